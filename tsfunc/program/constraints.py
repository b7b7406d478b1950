"""What a trace asked of named dims, and what the descriptors promise of them.

A fact that a trace has relied on must hold for every size that the descriptors allow. Where it
does not, the error shows the user's line that asked, and the descriptors for which it would hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tsfunc.bridge.bounds import choices, holds, holds_at, smallest
from tsfunc.bridge.size_texts import moduli, python_text
from tsfunc.bridge.symbols import Need
from tsfunc.dispatch.places import source_of
from tsfunc.errors import ConstraintViolation, DescriptorError
from tsfunc.program.edges import AtTheEdge, away_from, names_at_edge
from tsfunc.program.rewrites import rewrites_of
from tsfunc.types import Dim, DimExpr
from tsfunc.types.descriptors import Descriptor
from tsfunc.types.dims import DimSpec
from tsfunc.types.mending import as_python, with_dims

_MANY = 4096  # sizes that are tried one by one
_MOST = 1 << 40  # a size that stands for any, however large


def check_needs(
    name: str,
    needs: Sequence[Need],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
    retraced: bool,
) -> dict[str, Dim]:
    """Refuses a trace that has relied on more than the descriptors promise.

    Args:
        name: the function's.
        needs: what was asked.
        dims: the named dims.
        sizes: what each is in the call.
        described: the descriptors, by parameter.
        retraced: whether it was traced with other sizes than those of the call.

    Returns:
        The named dims that have another least size for this trace: NOTE [sizes at the edge].

    Raises:
        ConstraintViolation: it has.
        AtTheEdge: that may be so for the sizes of the call alone.
    """
    unmet = [need for need in needs if not holds(need.expr, dims)]
    if not unmet:
        return {}
    unmet = [_of_call(need, sizes) for need in unmet]
    raised, rest = away_from(unmet, dims)
    if not rest:
        return raised
    refusal = _refusal(name, rest, dims, sizes, described)
    at_edge = names_at_edge(rest)
    if at_edge and not retraced:
        raise AtTheEdge(at_edge, refusal)
    raise refusal


def _of_call(need: Need, sizes: Mapping[str, int]) -> Need:
    """A need that is the number of what stood for a size of 0 or 1, as the call would have it."""
    from sympy import Eq

    names = {str(symbol): symbol for symbol in need.expr.free_symbols}
    small = {symbol: sizes[name] for name, symbol in names.items() if sizes.get(name, 2) < 2}
    if not small or not isinstance(need.expr, Eq) or not need.expr.rhs.is_number:
        return need
    value = need.expr.lhs.subs({symbol: sizes[name] for name, symbol in names.items()})
    expr = Eq(need.expr.lhs, value, evaluate=False)
    return dataclasses.replace(need, fact=python_text(expr), expr=expr)


def _refusal(
    name: str,
    unmet: Sequence[Need],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
) -> ConstraintViolation:
    lines = "".join(
        f"  {need.fact}  (at {need.place}{source_of(need.place, '; ')})\n"
        for need in dict.fromkeys(unmet)
    )
    return ConstraintViolation(
        f"specialize({name}): one program can't serve every size that the descriptors allow, "
        f"because the function asks for more than they promise:\n{lines}"
        f"{_advice(unmet, dims, sizes, described)}"
        f"{_rewritten(unmet)}"
    )


def _rewritten(unmet: Sequence[Need]) -> str:
    text = rewrites_of(dict.fromkeys(source_of(need.place) for need in unmet))
    return f"\n{text}" if text else ""


# --- what would hold


def _advice(
    needs: Sequence[Need],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
) -> str:
    """The descriptors for which the facts hold, as Python."""
    mended = _mended(needs, dims, sizes)
    items = ", ".join(
        f"{parameter!r}: {as_python(with_dims(descriptor, mended))}"
        for parameter, descriptor in described.items()
    )
    opened = sorted(name for name, dim in mended.items() if dim is None)
    also = (
        f" (No descriptor says it of {', '.join(opened)}: left open, None, each size has a program "
        f"of its own.)"
        if opened
        else ""
    )
    return f"These descriptors promise it:\n  {{{items}}}{also}"


def _mended(
    needs: Sequence[Need], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> dict[str, DimSpec]:
    """For each dim of which something was asked, one that promises it; None: an open one."""
    found: dict[str, DimSpec] = {}
    for need in needs:
        names = sorted((str(symbol) for symbol in need.expr.free_symbols), key=list(dims).index)
        if any(not isinstance(found.get(name, Dim("d")), Dim) for name in names):
            continue  # one of them is said in terms of others, or fixed, or open
        mended: dict[str, DimSpec]
        if len(names) == 1:
            known = found.get(names[0], dims[names[0]])
            assert isinstance(known, Dim)
            mended = {names[0]: _bounded(need.expr, known, sizes.get(names[0], 0))}
        else:
            mended = _equated(need.expr, names, dims, sizes) or dict.fromkeys(names)
        found.update(mended)
    return found


def _bounded(fact: Any, dim: Dim, size: int) -> DimSpec:
    """A dim of which a fact about it alone holds, with the size of the call among those allowed."""
    from sympy import Eq, Ne

    if isinstance(fact, Eq) and not moduli(fact) and size < 2 and holds_at(fact, {dim.name: size}):
        return size
    if not (dim.admits(size) and size >= 2 and holds_at(fact, {dim.name: size})):
        size = next(
            (n for n in range(2, _MANY) if dim.admits(n) and holds_at(fact, {dim.name: n})), 0
        )
        if not size:
            return None
    for candidate in _candidates(fact, dim, size, Eq, Ne):
        try:
            mended = dim.meet(candidate) if isinstance(candidate, Dim) else candidate
        except DescriptorError:
            continue
        if isinstance(mended, int) or (mended.admits(size) and _seems_promised(fact, mended)):
            return mended
    return None


def _seems_promised(fact: Any, dim: Dim) -> bool:
    """Whether a fact holds for the sizes that a dim allows, as far as trying shows."""
    if holds(fact, {dim.name: dim}):
        return True
    step = dim.multiple_of or 1
    low = smallest(dim)
    low += -low % step
    most = _MOST if dim.max is None else dim.max
    tried = {*range(low, min(low + 64 * step, most + 1), step), most - most % step}
    return all(holds_at(fact, {dim.name: n}) for n in tried if dim.admits(n))


def _candidates(fact: Any, dim: Dim, size: int, eq: Any, ne: Any) -> Iterator[Dim | int]:
    name = dim.name

    def at(n: int) -> bool:
        return holds_at(fact, {name: n})

    if isinstance(fact, eq):
        yield from [Dim(name, multiple_of=step) for step in moduli(fact)]
        if not at(size + 1) and not at(size - 1) and not moduli(fact):
            yield size
    low = _boundary(at, size, 2)
    high = _boundary(at, size, _MOST)
    yield Dim(name, min=low if low > 2 else None, max=high if high < _MOST else None)
    if isinstance(fact, ne):
        yield Dim(name, min=size)
        yield Dim(name, max=size)
    yield size


def _boundary(holds: Callable[[int], bool], inside: int, limit: int) -> int:
    """The last number on the way from one that holds towards a limit, up to which all hold."""
    step = 1 if limit > inside else -1
    near = inside
    for _ in range(256):  # holes are near, if there are any
        if near == limit or not holds(near + step):
            return near
        near += step
    if holds(limit):
        return limit
    far = limit
    while abs(far - near) > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if holds(middle) else (near, middle)
    return near


def _equated(
    fact: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> dict[str, DimSpec] | None:
    """One of several dims in terms of the others, where the fact says what it is."""
    from sympy import Eq

    for case in choices(fact) if isinstance(fact, Eq) else ():
        if not holds_at(case, sizes):
            continue
        for name in reversed(names):
            found = _solved_for(case, name)
            if found is None:
                continue
            solution, text = found
            rest = fact.xreplace({s: solution for s in fact.free_symbols if str(s) == name})
            if holds(rest, dims):
                return {name: text}
            others = [str(symbol) for symbol in rest.free_symbols]
            if len(others) == 1:
                bounded = _bounded(rest, dims[others[0]], sizes[others[0]])
                if bounded is not None:
                    return {name: text, others[0]: bounded}
    return None


def _solved_for(fact: Any, name: str) -> tuple[Any, str | int] | None:
    """What an equality says that a dim is, as an expression and as a descriptor has it."""
    from sympy import Symbol, solve

    symbols = {str(symbol): symbol for symbol in fact.free_symbols}
    if name not in symbols:
        return None
    free = Symbol(name)
    difference = (fact.lhs - fact.rhs).xreplace({symbols[name]: free})
    found = solve(difference, free) if difference.is_polynomial(free) else []
    if len(found) != 1:
        return None
    if found[0].is_Integer:
        return (found[0], int(found[0])) if found[0] >= 0 else None
    try:
        text = python_text(found[0])
        return found[0], text if text in symbols else DimExpr(text).text
    except DescriptorError:
        return None
