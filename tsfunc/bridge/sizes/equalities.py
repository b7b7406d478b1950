"""Finds pairs of sizes that an operator requires to be equal.

Among the conditions that an operator's rule tests (NOTE [guards of operators] in
``fake_results``), equalities of two sizes are special: two names mean two sizes, and a function
that needs equal sizes needs descriptors that say so. An equality is needed if the operator raises
whenever it is broken: it raises at all tried sizes that satisfy the other equalities but not this
one. Sizes 0 and 1, which broadcast, are not tried, because they say nothing about other sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import is_true

_BREAKS = 3  # sizes that break an equality; the operator must refuse each of them
_DRAWS = 24  # attempts to find such sizes
_Sizes = Mapping[Any, int]


def required_equalities(
    conditions: Sequence[Any], hints: _Sizes, accepts: Callable[[_Sizes], bool]
) -> list[Any]:
    """Return the equalities that an operator needs, among the conditions that its rule tests.

    Args:
        conditions: the conditions, as sympy relations.
        hints: the sizes of the call, by symbol.
        accepts: returns True if the operator accepts given sizes.
    """
    equalities = _independent(_equalities(conditions, hints), hints)
    needed = []
    for equality in equalities:
        others = [other for other in equalities if other is not equality]
        broken = list(_sizes_that_break(equality, others, hints))
        if broken and not any(map(accepts, broken)):
            needed.append(equality)
    return needed


def or_one(equality: Any, hints: _Sizes, accepts: Callable[[_Sizes], bool]) -> Any:
    """Return an equality of a size and a number, or with 1 as an alternative if that broadcasts.

    Args:
        equality: an equality that the operator needs.
        hints, accepts: as in :func:`required_equalities`.
    """
    from sympy import Eq, Or

    symbol, number = _solve(equality)
    if symbol is None or not number.is_Integer or not accepts({**hints, symbol: 1}):
        return equality
    return Or(equality, Eq(symbol, 1))


def is_multiple(equality: Any) -> bool:
    """True if an equality compares a remainder with 0."""
    from torch.utils._sympy.functions import Mod, PythonMod

    return bool(equality.has(Mod, PythonMod))


def satisfy(equalities: Sequence[Any], sizes: _Sizes) -> dict[Any, int]:
    """Return sizes changed to satisfy equalities, as far as these determine a symbol."""
    fitted = dict(sizes)
    for _ in equalities:  # one change may affect the others
        for symbol, by in filter(None, map(_multiple, equalities)):
            fitted[symbol] = max(fitted[symbol] - fitted[symbol] % by, by)
        for symbol, value in map(_solve, equalities):
            if symbol is not None and value.free_symbols <= fitted.keys():
                fitted[symbol] = int(value.xreplace(fitted))
    return fitted


def _equalities(conditions: Sequence[Any], hints: _Sizes) -> list[Any]:
    """Return the equalities in the conditions that hold at the sizes of the call."""
    from sympy import And, Eq, Ne

    equalities: dict[Any, None] = {}
    for condition in dict.fromkeys(conditions):
        for part in sorted(And.make_args(condition), key=str):
            equality = Eq(*part.args) if isinstance(part, Ne) else part
            if (
                isinstance(equality, Eq)
                and equality.free_symbols <= hints.keys()
                and equality.xreplace(hints)
            ):
                equalities[equality] = None
    return list(equalities)


def _independent(equalities: Sequence[Any], hints: _Sizes) -> list[Any]:
    """Return the equalities that do not follow from earlier ones, as far as breaking them shows."""
    independent: list[Any] = []
    solved: dict[Any, Any] = {}
    for equality in equalities:
        rest = equality.xreplace(solved)
        unsolved = any(_solve(other)[0] is None for other in independent)
        if is_true(rest) or (unsolved and not any(_sizes_that_break(equality, independent, hints))):
            continue
        independent.append(equality)
        symbol, other = _solve(rest)
        if symbol is not None:
            solved = {each: value.xreplace({symbol: other}) for each, value in solved.items()}
            solved[symbol] = other
    return independent


def _solve(equality: Any) -> tuple[Any, Any]:
    """Return a symbol and the expression it equals, or None twice if no side is a symbol."""
    for symbol, other in ((equality.lhs, equality.rhs), (equality.rhs, equality.lhs)):
        if symbol.is_Symbol and symbol not in other.free_symbols:
            return symbol, other
    return None, None


def _multiple(equality: Any) -> tuple[Any, int] | None:
    """Return a symbol and the number that a equality makes it a multiple of, else None."""
    from torch.utils._sympy.functions import Mod, PythonMod

    if isinstance(equality.lhs, Mod | PythonMod) and equality.rhs == 0:
        symbol, by = equality.lhs.args
        if symbol.is_Symbol and by.is_Integer:
            return symbol, int(by)
    return None


def _sizes_that_break(
    equality: Any, others: Sequence[Any], hints: _Sizes
) -> Iterator[dict[Any, int]]:
    """Yield sizes of at least 2 that break a equality and satisfy the others."""
    drawn = random.Random(0)
    count = 0
    for _ in range(_DRAWS):
        sizes = {symbol: drawn.randrange(2, 2 * size + 8) for symbol, size in hints.items()}
        sizes = satisfy(others, sizes)
        if _breaks(equality, others, sizes):
            yield sizes
            count += 1
        if count == _BREAKS:
            return


def _breaks(equality: Any, others: Sequence[Any], sizes: _Sizes) -> bool:
    """True if, at given sizes, a equality fails and the others hold."""
    try:
        return (
            _least_side((equality, *others), sizes) >= 2
            and not equality.xreplace(sizes)
            and all(other.xreplace(sizes) for other in others)
        )
    except ZeroDivisionError:  # one size is divided by another, which is 0 here
        return False


def _least_side(equalities: Sequence[Any], sizes: _Sizes) -> int:
    """Return the smallest size in some equalities, without the sides of remainders."""
    sides = [
        int(side.xreplace(sizes))
        for equality in equalities
        if not is_multiple(equality)
        for side in equality.args
    ]
    return min(sides, default=2)
