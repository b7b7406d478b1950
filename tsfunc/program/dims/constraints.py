"""The constraints on named dims that a trace relies on, checked against the descriptors.

NOTE [small sizes]
Operators treat the sizes 0 and 1 differently (NOTE [sizes 0 and 1]). The same holds for sizes that
are computed from named dims, such as the size ``h - 2`` that a convolution leaves of ``h``. torch
tests for these sizes when it decides about broadcasting and empty tensors. Only few sizes of ``h``
lead to them, and user code rarely depends on it. The program is therefore made for the other sizes:
its named dims have a minimum size of their own. A call with a smaller size has a program in which
that size is a number. A test in the function's own code remains a constraint that the descriptors
must guarantee.

A constraint must hold for every size that the descriptors allow. If it does not, the error shows
the user's line that relies on it, and the descriptors for which it would hold.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import (
    has_maximum,
    holds_for_all,
    with_least_minima,
    without_common_factor,
)
from tsfunc.bridge.sizes.expressions import python_text
from tsfunc.bridge.sizes.symbols import Constraint
from tsfunc.errors import ConstraintViolation
from tsfunc.program.assumptions import Assumptions, Retrace
from tsfunc.program.dims.suggested_fixes import suggested_dims, text_of_fixes
from tsfunc.types import Dim, MetaTensorType
from tsfunc.types.grammar import Descriptor
from tsfunc.user_code import source_line

# --- small sizes: those for which a size computed from them is 0 or 1


def larger_minima(
    constraints: Sequence[Constraint], dims: Mapping[str, Dim]
) -> tuple[dict[str, Dim], list[Constraint]]:
    """Return larger minima for named dims that satisfy the constraints on small sizes.

    Args:
        constraints: those that a trace relies on and the dims do not guarantee.

    Returns:
        The dims with a new minimum, and the constraints that no minimum satisfies.
    """
    larger: dict[str, Dim] = {}
    rest = []
    for constraint in sorted(constraints, key=lambda each: len(each.expr.free_symbols)):
        expr = (
            constraint.expr if constraint.by_user else without_common_factor(constraint.expr, dims)
        )
        names = sorted(str(symbol) for symbol in expr.free_symbols)
        about = {name: larger.get(name, dims[name]) for name in names}
        bounded = (
            with_least_minima(expr, about)
            if not constraint.by_user and _is_about_small_size(expr)
            else None
        )
        if bounded is None:
            rest.append(constraint)
        else:
            larger.update(bounded)
    return larger, rest


def names_of(constraints: Sequence[Constraint]) -> frozenset[str]:
    """Return the named dims in constraints."""
    symbols = [constraint.expr.free_symbols for constraint in constraints]
    return frozenset(str(symbol) for symbol in set().union(*symbols))


def _is_about_small_size(constraint: Any) -> bool:
    """True if a constraint compares a size with 0 or 1, or contains a maximum of sizes."""
    from sympy.core.relational import Relational

    if not isinstance(constraint, Relational):
        return False
    return has_maximum(constraint) or not {0, 1}.isdisjoint((constraint.lhs, constraint.rhs))


# --- rewrites of lines that convert a named dim to a Python number, so that it stays symbolic


_REWRITES = {
    "len": "x.shape[0] for len(x)",
    "int": "n // 2 for int(n / 2), torch.sym_int(y) for int(y)",
    "float": "torch.sym_float(n) for float(n)",
    "range": "tsfunc.fori_loop, tsfunc.scan or tsfunc.map for a loop over range(n)",
    "min": "torch.sym_min(a, b) for min(a, b)",
    "max": "torch.sym_max(a, b) for max(a, b)",
    "math.sqrt": "n ** 0.5 for math.sqrt(n)",
    "math.pow": "n ** p for math.pow(n, p)",
    "math.log": "torch.tensor(n).log() for math.log(n)",
    "math.log2": "torch.tensor(n).log2() for math.log2(n)",
    "math.exp": "torch.tensor(n).exp() for math.exp(n)",
}
# Python compares tuples item by item, even if their lengths differ.
_SHAPES = re.compile(r"\.shape\s*[!=]=")
_OF_SHAPES = "x.dim() == y.dim() and x.shape == y.shape where ranks may differ"


def suggested_rewrites(lines: Iterable[str]) -> str:
    """Return advice for the calls in some lines that need a Python number, or an empty text.

    Example:
        >>> print(suggested_rewrites(["y = x[: min(x.shape[0], 8)]"]))
        A function for every size has torch.sym_min(a, b) for min(a, b).
    """
    text = "\n".join(lines)
    rewrites = [
        rewrite
        for call, rewrite in _REWRITES.items()
        if re.search(rf"(?<![\w.]){re.escape(call)}\(", text)
    ]
    if _SHAPES.search(text) and ".dim()" not in text:
        rewrites.append(_OF_SHAPES)
    return f"A function for every size has {'; '.join(rewrites)}." if rewrites else ""


# --- the check


def check_constraints(
    name: str,
    constraints: Sequence[Constraint],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
    undescribed_shapes: Mapping[str, Sequence[int]],
    assumptions: Assumptions,
) -> dict[str, Dim]:
    """Refuse a trace that relies on more than the descriptors guarantee.

    Args:
        undescribed_shapes: the shapes of tensors without descriptors, by parameter.

    Returns:
        The named dims with another minimum size for this trace: NOTE [small sizes].

    Raises:
        ConstraintViolation: the trace relies on more than the descriptors guarantee.
        Retrace: the same, but the function does not test the sizes: torch does, or this package,
            and may not for other sizes.
    """
    unmet = [
        part
        for constraint in constraints
        for part in _conjuncts(constraint)
        if not holds_for_all(part.expr, dims)
    ]
    if not unmet:
        return {}
    unmet = [_of_call(constraint, sizes) for constraint in unmet]
    larger, rest = larger_minima(unmet, dims)
    if not rest:
        return larger
    refusal = _violation(name, rest, dims, sizes, described, undescribed_shapes)
    if not assumptions.other_hints and not any(constraint.by_user for constraint in rest):
        raise Retrace(assumptions.with_changes(other_hints=names_of(rest), refusal=refusal))
    raise refusal


def _conjuncts(constraint: Constraint) -> Sequence[Constraint]:
    """Return the constraints whose conjunction a constraint is."""
    from sympy import And

    parts = sorted(And.make_args(constraint.expr), key=str)
    if len(parts) == 1:
        return [constraint]
    return [dataclasses.replace(constraint, text=python_text(part), expr=part) for part in parts]


def _of_call(constraint: Constraint, sizes: Mapping[str, int]) -> Constraint:
    """Return a constraint that fixes a number, with the number of the call.

    The trace has another size as a hint for a size of 0 or 1, so its number differs.
    """
    from sympy import Eq

    names = {str(symbol): symbol for symbol in constraint.expr.free_symbols}
    small = {symbol: sizes[name] for name, symbol in names.items() if sizes.get(name, 2) < 2}
    if not small or not isinstance(constraint.expr, Eq) or not constraint.expr.rhs.is_number:
        return constraint
    value = constraint.expr.lhs.subs({symbol: sizes[name] for name, symbol in names.items()})
    expr = Eq(constraint.expr.lhs, value, evaluate=False)
    return dataclasses.replace(constraint, text=python_text(expr), expr=expr)


def _violation(
    name: str,
    unmet: Sequence[Constraint],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
    undescribed_shapes: Mapping[str, Sequence[int]],
) -> ConstraintViolation:
    lines = "".join(
        f"  {constraint.text}  (at {constraint.location}{source_line(constraint.location, '; ')})\n"
        for constraint in dict.fromkeys(unmet)
    )
    suggested = suggested_dims(unmet, dims, sizes)
    return ConstraintViolation(
        f"specialize({name}): one program can't serve every size that the descriptors allow, "
        f"because the function needs more than they guarantee:\n{lines}"
        f"{text_of_fixes(suggested, described) if described else ''}"
        f"{_advice_to_describe(unmet, undescribed_shapes)}"
        f"{_rewriting_advice(unmet)}{_reasons(unmet)}",
        suggested,
    )


def _advice_to_describe(
    unmet: Sequence[Constraint], undescribed_shapes: Mapping[str, Sequence[int]]
) -> str:
    """Return the advice to describe tensors whose sizes a named dim is compared with."""
    from sympy import Eq

    equalities = [constraint.expr for constraint in unmet if isinstance(constraint.expr, Eq)]
    numbers = {
        int(number): str(symbol)
        for equality in equalities
        for symbol, number in ((equality.lhs, equality.rhs), (equality.rhs, equality.lhs))
        if symbol.is_Symbol and number.is_Integer
    }
    lines = [
        f"\nThe size {size} is {parameter}.shape[{k}], which has no descriptor: "
        f"{{{parameter!r}: {MetaTensorType([*shape[:k], numbers[size], *shape[k + 1 :]])!r}}} "
        f"makes it {numbers[size]}."
        for parameter, shape in undescribed_shapes.items()
        for k, size in enumerate(shape)
        if size in numbers
    ]
    return "".join(lines[:3])


def _reasons(unmet: Sequence[Constraint]) -> str:
    return "".join(
        f"\n{reason}"
        for reason in dict.fromkeys(constraint.reason for constraint in unmet)
        if reason
    )


def _rewriting_advice(unmet: Sequence[Constraint]) -> str:
    text = suggested_rewrites(
        dict.fromkeys(source_line(constraint.location) for constraint in unmet)
    )
    return f"\n{text}" if text else ""
