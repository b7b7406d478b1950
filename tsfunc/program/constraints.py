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
        f"\n(No descriptor says it of {', '.join(opened)}: left open, None, each size has a "
        f"program of its own.)"
        if opened
        else ""
    )
    return f"These descriptors promise it:\n  {{{items}}}{also}"


def _mended(
    needs: Sequence[Need], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> dict[str, DimSpec]:
    """For each dim of which something was asked, one that promises it; None: an open one."""
    from sympy import Eq, Integer, Symbol

    def equates(need: Need) -> bool:
        return isinstance(need.expr, Eq) and len(need.expr.free_symbols) > 1

    def solve(name: str, solution: Any) -> None:
        for each, value in solved.items():
            solved[each] = value.xreplace({Symbol(name): solution})
        solved[name] = solution

    found: dict[str, DimSpec] = {}
    solved: dict[str, Any] = {}  # those that are said in terms of others, or fixed
    for need in sorted(needs, key=equates, reverse=True):  # bounds are of what is left then
        fact = need.expr.xreplace({Symbol(name): value for name, value in solved.items()})
        names = sorted((str(symbol) for symbol in fact.free_symbols), key=list(dims).index)
        if not names or any(found.get(name, 0) is None for name in names):
            continue  # nothing is left to say, or it is left open
        bounded = {name: dim for name in names if isinstance(dim := found.get(name), Dim)}
        if len(names) == 1:
            known = {**dims, **bounded}[names[0]]
            found[names[0]] = mended = _bounded(fact, known, sizes.get(names[0], 0))
            if isinstance(mended, int):
                solve(names[0], Integer(mended))
            continue
        equated = _equated(fact, names, {**dims, **bounded}, sizes)
        if equated is None:
            found.update(dict.fromkeys(names))
            continue
        name, solution, others = equated
        found.update(others)
        solve(name, solution)
    opened = {Symbol(name) for name, dim in found.items() if dim is None}
    for name, value in solved.items():
        found[name] = None if value.free_symbols & opened else _spelled(value)
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
) -> tuple[str, Any, dict[str, DimSpec]] | None:
    """One of several dims in terms of the others, where the fact says what it is.

    Returns:
        Its name, what it is, and bounds of another one for which the fact holds then.
    """
    from sympy import Eq

    for case in choices(fact) if isinstance(fact, Eq) else ():
        if not holds_at(case, sizes):
            continue
        for name in reversed(names):
            solution = _solved_for(case, name)
            if solution is None:
                continue
            rest = fact.xreplace({s: solution for s in fact.free_symbols if str(s) == name})
            if holds(rest, dims):
                return name, solution, {}
            others = [str(symbol) for symbol in rest.free_symbols]
            if len(others) == 1:
                bounded = _bounded(rest, dims[others[0]], sizes[others[0]])
                if isinstance(bounded, Dim):
                    return name, solution, {others[0]: bounded}
    return None


def _solved_for(fact: Any, name: str) -> Any:
    """What an equality says that a dim is; None where a descriptor can't say that."""
    from sympy import Symbol, solve

    symbols = {str(symbol): symbol for symbol in fact.free_symbols}
    if name not in symbols:
        return None
    free = Symbol(name)
    difference = (fact.lhs - fact.rhs).xreplace({symbols[name]: free})
    found = solve(difference, free) if difference.is_polynomial(free) else []
    return found[0] if len(found) == 1 and _spelled(found[0]) is not None else None


def _spelled(value: Any) -> DimSpec:
    """An expression as a descriptor has it; None where it can't have it."""
    if value.is_Integer:
        return int(value) if value >= 0 else None
    try:
        text = python_text(value)
        return text if value.is_Symbol else DimExpr(text).text
    except DescriptorError:
        return None
