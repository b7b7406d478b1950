"""Types where control flow joins: the branches of a condition, and the carry of a loop.

A variable keeps its type. After a condition its type is the join of its types in the branches,
which must not be ``Any``. The carry of a loop has the same type in every iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tsfunc.errors import AnnotationError, TypeCheckError
from tsfunc.types.base import TSAllType, TSType, plain
from tsfunc.types.lattice import is_subtype, join, nominal_view
from tsfunc.types.single import ANY, TSTensor
from tsfunc.user_code import folding


@folding()
def join_branches(
    branches: Mapping[str, TSAllType], *, where: str = "cond", exact: bool = False
) -> TSType:
    """Return the type of the result of one of several branches.

    Args:
        branches: the name of each branch in errors, and the type of its result.
        where: the name of the operator in errors.
        exact: True if the types must be equal: None does not join with another type, and tensors do
            not join with tensors of other metadata.

    Raises:
        TypeCheckError: the only common type of the branches is ``Any``, or, if ``exact``, their
            types differ. The message has the type of each branch, and each path at which they
            differ.

    Example:
        >>> from tsfunc.types import parse
        >>> print(join_branches({"true": parse("f32[3, 4]"), "false": parse("f32[5, 4]")}))
        f32[?, 4]
        >>> join_branches({"true": parse("Tuple[int, Tensor]"), "false": parse("Tuple[int, str]")})
        Traceback (most recent call last):
        ...
        tsfunc.errors.TypeCheckError: cond: its branches return values of different types:
          true: Tuple[int, Tensor]
          false: Tuple[int, str]
        At [1] nothing is both Tensor and str but Any, which nothing computes with. Return the \
same type from each branch.

    Source: the check of control-flow joins in the TorchScript type system proposal.
    """
    if not isinstance(branches, Mapping) or not branches:
        raise AnnotationError(
            f"join_branches: expected a dict of branch name to type, got {branches!r}"
        )
    first, *rest = map(nominal_view, branches.values())
    joined, faults = first, []
    for type_ in rest:
        faults += branch_faults(joined, type_, exact=exact)
        joined = join(joined, type_)
    listed_faults = "; ".join(dict.fromkeys(faults))
    if listed_faults:
        listed = "".join(f"  {name}: {type_}\n" for name, type_ in branches.items())
        raise TypeCheckError(
            f"{where}: its branches return values of different types:\n{listed}{listed_faults}. "
            f"Return the same type from each branch."
        )
    return joined


def branch_faults(left: TSType, right: TSType, path: str = "", *, exact: bool) -> list[str]:
    """Return a line for each path at which the types of two branches are incompatible."""
    candidates = (
        _fault(f"At {at}" if at else "There", one, other, exact)
        for at, one, other in differences(left, right, path)
    )
    return [fault for fault in candidates if fault]


def _fault(at: str, one: TSType, other: TSType, exact: bool) -> str:
    if exact:
        return f"{at} one is {one}, the other {other}"
    if join(one, other) == ANY and ANY not in (one, other):
        return f"{at} nothing is both {one} and {other} but Any, which nothing computes with"
    return ""


@folding()
def check_carry(
    before: TSAllType, after: TSAllType, *, where: str = "while_loop", name: str = "the carry"
) -> TSType:
    """Return the type of the carry of a loop.

    Args:
        before: the type of the initial value.
        after: the type of the value that the body returns for it.
        where: the name of the operator in errors.
        name: the name of the carried value in errors.

    Raises:
        TypeCheckError: the body's result does not have the type of the initial value. The message
            has both types, and each path at which they differ.

    Example:
        >>> from tsfunc.types import parse
        >>> check_carry(parse("Tuple[f32[3], i64[]]"), parse("Tuple[f32[4], i64[]]"), where="scan")
        Traceback (most recent call last):
        ...
        tsfunc.errors.TypeCheckError: scan: the type of the carry changes:
          before the first step: Tuple[f32[3], i64[]]
          after a step: Tuple[f32[4], i64[]]
        At [0] f32[3] has become f32[4]. Return values of the same type, shape and dtype from the \
body.

    Source: the check of control-flow joins in the TorchScript type system proposal; ``lax.scan``.
    """
    one, other = nominal_view(before), nominal_view(after)
    faults = carry_faults(one, other)
    if faults:
        raise TypeCheckError(
            f"{where}: the type of {name} changes:\n  before the first step: {before}\n"
            f"  after a step: {after}\n{'; '.join(faults)}. Return values of the "
            f"same type, shape and dtype from the body."
        )
    return one


def carry_faults(before: TSType, after: TSType, path: str = "") -> list[str]:
    """Return a line for each path at which the body's result does not fit its carry."""
    return [
        f"At {at} {one} has become {other}" if at else f"{one} has become {other}"
        for at, one, other in differences(before, after, path)
        if not is_subtype(other, one) or not _same_sizes(one, other)
    ]


def _same_sizes(before: TSType, after: TSType) -> bool:
    """True if known sizes stay the same.

    Here a name is the size of the initial value, not any size.
    """
    if not isinstance(before, TSTensor) or not isinstance(after, TSTensor):
        return True
    ones, others = (x.meta.dims or x.meta.trailing for x in (before, after))
    pairs = zip(reversed(ones), reversed(others), strict=False)
    return all(size is None or size == other for size, other in pairs)


@folding()
def differences(
    left: TSType, right: TSType, path: str = ""
) -> Iterator[tuple[str, TSType, TSType]]:
    """Yield each innermost path at which two types differ, with the types there."""
    if left == right:
        return
    pairs = list(zip(left.steps, left.parts, right.parts, strict=False))
    # Lists and dicts of unequal elements differ as a whole: see NOTE [the order of types].
    written = left.invariant and plain(left) != plain(right)
    whole = not left.parts or written or not left.differs_in_parts(right)
    if whole or any(step is None and one != other for step, one, other in pairs):
        yield path, left, right
    else:
        for step, one, other in pairs:
            yield from differences(one, other, f"{path}{step or ''}")
