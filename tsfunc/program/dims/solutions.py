"""Descriptions of one named dim for which a fact holds: bounds, or an expression of other dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tsfunc.bridge.sizes.bounds import (
    choices,
    holds,
    holds_at,
    period_of,
    smallest,
    with_larger,
)
from tsfunc.bridge.sizes.size_texts import divisions, moduli, python_text
from tsfunc.errors import DescriptorError
from tsfunc.types import Dim, DimExpr
from tsfunc.types.dims import DimSpec

_MANY = 4096  # maximum number of sizes that are tried one by one
_MOST = 1 << 40  # a size that stands for all larger ones


@dataclass(frozen=True)
class Solution:
    """A dim as an expression of others.

    Attributes:
        name: the name of the dim.
        value: the expression.
        others: dims in the expression that have new bounds, or that are new.
        sizes: the sizes of the new dims in the call.
    """

    name: str
    value: Any
    others: Sequence[Dim] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


def bounded(fact: Any, dim: Dim, size: int) -> Dim | int | None:
    """Return a dim for which a fact about it alone holds, and which admits the size of the call.

    If the size of the call does not satisfy the fact, a size that does replaces it.

    Returns:
        The dim, or the size that the fact fixes it to; None if no description was found.
    """
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
            suggested = dim.meet(candidate) if isinstance(candidate, Dim) else candidate
        except DescriptorError:
            continue
        if isinstance(suggested, int):
            return suggested
        if suggested.admits(size) and _seems_promised(fact, suggested):
            return _shown(fact, suggested, size)
    return None


def _shown(fact: Any, dim: Dim, size: int) -> Dim:
    """Return the dim; if its bounds do not imply the fact, bounded to sizes that can be tried."""
    if holds(fact, {dim.name: dim}):
        return dim
    few = dim.meet(Dim(dim.name, max=smallest(dim) + _MANY - 1))
    return few if few.admits(size) and holds(fact, {dim.name: few}) else dim


def _seems_promised(fact: Any, dim: Dim) -> bool:
    """Return True if a fact holds for the sizes that a dim allows, as far as trials show."""
    if holds(fact, {dim.name: dim}):
        return True
    step = dim.multiple_of or 1
    low = smallest(dim)
    low += -low % step
    most = _MOST if dim.max is None else dim.max
    tried = {*range(low, min(low + 64 * step, most + 1), step), most - most % step}
    return all(holds_at(fact, {dim.name: n}) for n in tried if dim.admits(n))


def _candidates(fact: Any, dim: Dim, size: int, eq: Any, ne: Any) -> Iterator[Dim | int]:
    from sympy import Integer, Or

    name = dim.name

    def at(n: int) -> bool:
        return holds_at(fact, {name: n})

    if isinstance(fact, eq) or moduli(fact):
        yield from [Dim(name, multiple_of=step) for step in _steps(fact) if size % step == 0]
    if isinstance(fact, eq) and not at(size + 1) and not at(size - 1) and not moduli(fact):
        yield size
    if isinstance(fact, Or):  # a broadcast with a number: the size is 1 or the number
        numbers = [int(number) for number in fact.atoms(Integer) if number >= 0]
        yield Dim(name, one_of=tuple(n for n in {*numbers, size} if at(n)))
    low = _boundary(at, size, 2)
    high = _boundary(at, size, _MOST)
    yield Dim(name, min=low if low > 2 else None, max=high if high < _MOST else None)
    if isinstance(fact, ne):
        yield Dim(name, min=size)
        yield Dim(name, max=size)
    yield size


def _steps(fact: Any) -> list[int]:
    """Return the numbers that a size may have to be a multiple of, the smallest first."""
    from sympy.core.relational import Relational

    period = period_of(fact.lhs - fact.rhs) if isinstance(fact, Relational) else None
    if period is None or period > _MANY:
        return moduli(fact)
    return [step for step in range(2, period + 1) if period % step == 0]


def stepped(
    fact: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Sequence[Dim] | None:
    """Return several dims as multiples of their divisors: ``h`` and ``w`` in patches of 4.

    Returns:
        The dims; None if the fact does not hold for them, or they do not admit the call's sizes.
    """
    found = {name: dims[name] for name in names}
    for name, step in divisions(fact):
        try:
            found[name] = found[name].meet(Dim(name, multiple_of=step))
        except DescriptorError:
            return None
    fits = all(dim.admits(sizes[name]) for name, dim in found.items())
    return list(found.values()) if fits and holds(fact, found) else None


def leaving_remainder(fact: Any, dim: Dim, size: int, taken: Container[str]) -> Solution | None:
    """Return a dim as an expression with its remainder in the call: ``2 * extra + 1``.

    Args:
        fact: a fact about this dim alone.
        dim: the dim.
        size: its size in the call.
        taken: the names of dims.

    Returns:
        The solution, or None if there is none.
    """
    from sympy import Symbol

    extra = next(name for name in _extra_names() if name not in taken)
    for step in _steps(fact):
        value = step * Symbol(extra) + size % step
        said = fact.xreplace(dict.fromkeys(fact.free_symbols, value))
        if size % step and holds(said, {extra: Dim(extra)}):
            return Solution(dim.name, value, [Dim(extra)], {extra: size // step})
    return None


def _boundary(holds: Callable[[int], bool], inside: int, limit: int) -> int:
    """Return the last number from ``inside`` towards a limit for which all numbers so far hold."""
    step = 1 if limit > inside else -1
    near = inside
    for _ in range(256):  # any gaps are close to the start
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


def equated(
    fact: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Solution | None:
    """Return one of several dims as an expression of the others, if an equality implies it."""
    from sympy import Eq, Symbol

    for case in choices(fact) if isinstance(fact, Eq) else ():
        if not holds_at(case, sizes):
            continue
        for name in reversed(names):
            value = _solved_for(case, name)
            if value is None or not holds_at(Eq(Symbol(name), value), sizes):
                continue
            rest = fact.xreplace({s: value for s in fact.free_symbols if str(s) == name})
            if holds(rest, dims):
                return Solution(name, value)
            others = [str(symbol) for symbol in rest.free_symbols]
            if len(others) == 1:
                dim = bounded(rest, dims[others[0]], sizes[others[0]])
                if isinstance(dim, Dim):
                    return Solution(name, value, [dim])
    return None


def ordered(
    fact: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Solution | None:
    """Return one of several dims as a lower bound plus a new dim: ``b + extra`` for ``a >= b``."""
    from sympy import Symbol

    surplus = _surplus(fact, sizes)
    if surplus is None or not holds_at(surplus >= 0, sizes):
        return None
    extra = next(name for name in _extra_names() if name not in {*dims, *sizes})
    known = {**dims, extra: Dim(extra)}
    for name in names:
        least = Symbol(name) - surplus
        value = least + Symbol(extra)
        if Symbol(name) in least.free_symbols or spelled(value) is None:
            continue
        others = _kept(least, dims[name], known, sizes)
        if others is not None:
            size = int(surplus.subs({Symbol(each): sizes[each] for each in names}))
            return Solution(name, value, [*others, known[extra]], {extra: size})
    return None


def _kept(
    least: Any, dim: Dim, dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Iterable[Dim] | None:
    """Return dims with larger minima, so that the lower bound of another meets its minimum.

    Returns:
        The dims; None if this is not possible, or if they do not admit the sizes of the call.
    """
    if dim.max is not None or dim.multiple_of is not None or dim.one_of is not None:
        return None
    names = sorted(str(symbol) for symbol in least.free_symbols)
    raised = with_larger(least >= (dim.min or 0), {name: dims[name] for name in names})
    if raised is None or not all(each.admits(sizes[each.name]) for each in raised.values()):
        return None
    return raised.values()


def _surplus(fact: Any, sizes: Mapping[str, int]) -> Any:
    """Return a polynomial that is not negative if a fact holds; None for facts of other kinds."""
    from sympy import Ge, Gt, Le, Lt, Ne, expand

    if not isinstance(fact, Ge | Gt | Le | Lt | Ne):
        return None
    difference = expand(fact.lhs - fact.rhs)
    if not difference.is_polynomial(*difference.free_symbols):
        return None
    if isinstance(fact, Le | Lt) or (isinstance(fact, Ne) and not holds_at(difference > 0, sizes)):
        difference = -difference
    return difference if isinstance(fact, Ge | Le) else difference - 1


def _extra_names() -> Iterator[str]:
    return itertools.chain(["extra"], (f"extra{i}" for i in itertools.count(2)))


def _solved_for(fact: Any, name: str) -> Any:
    """Return the value of a dim from an equality; None if a descriptor can't express it."""
    from sympy import Symbol, solve

    symbols = {str(symbol): symbol for symbol in fact.free_symbols}
    if name not in symbols:
        return None
    free = Symbol(name)
    difference = (fact.lhs - fact.rhs).xreplace({symbols[name]: free})
    found = solve(difference, free) if difference.is_polynomial(free) else []
    return found[0] if len(found) == 1 and spelled(found[0]) is not None else None


def spelled(value: Any) -> DimSpec:
    """Return an expression in the syntax of descriptors; None if they can't express it."""
    if value.is_Integer:
        return int(value) if value >= 0 else None
    try:
        text = python_text(value)
        return text if value.is_Symbol else DimExpr(text).text
    except DescriptorError:
        return None
