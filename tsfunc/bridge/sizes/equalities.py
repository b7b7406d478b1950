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


def required(
    conditions: Sequence[Any], hints: _Sizes, accepts: Callable[[_Sizes], bool]
) -> list[Any]:
    """Return the equalities that an operator needs, among the conditions that its rule tests.

    Args:
        conditions: the conditions, as sympy relations.
        hints: the sizes of the call, by symbol.
        accepts: returns True if the operator accepts given sizes.
    """
    facts = _independent(_equalities(conditions, hints), hints)
    needed = []
    for fact in facts:
        kept = [other for other in facts if other is not fact]
        broken = list(_breaking(fact, kept, hints))
        if broken and not any(map(accepts, broken)):
            needed.append(fact)
    return needed


def or_one(fact: Any, hints: _Sizes, accepts: Callable[[_Sizes], bool]) -> Any:
    """Return an equality of a size and a number, or with 1 as an alternative if that broadcasts.

    Args:
        fact: an equality that the operator needs.
        hints, accepts: as in :func:`required`.
    """
    from sympy import Eq, Or

    symbol, number = _solved(fact)
    if symbol is None or not number.is_Integer or not accepts({**hints, symbol: 1}):
        return fact
    return Or(fact, Eq(symbol, 1))


def is_multiple(fact: Any) -> bool:
    """True if an equality compares a remainder with 0."""
    from torch.utils._sympy.functions import Mod, PythonMod

    return bool(fact.has(Mod, PythonMod))


def satisfying(facts: Sequence[Any], sizes: _Sizes) -> dict[Any, int]:
    """Return sizes changed to satisfy equalities, as far as these determine a symbol."""
    kept = dict(sizes)
    for _ in facts:  # one change may affect the others
        for symbol, by in filter(None, map(_multiple, facts)):
            kept[symbol] = max(kept[symbol] - kept[symbol] % by, by)
        for symbol, value in map(_solved, facts):
            if symbol is not None and value.free_symbols <= kept.keys():
                kept[symbol] = int(value.xreplace(kept))
    return kept


def _equalities(conditions: Sequence[Any], hints: _Sizes) -> list[Any]:
    """Return the equalities in the conditions that hold at the sizes of the call."""
    from sympy import And, Eq, Ne

    equalities: dict[Any, None] = {}
    for condition in dict.fromkeys(conditions):
        for part in sorted(And.make_args(condition), key=str):
            fact = Eq(*part.args) if isinstance(part, Ne) else part
            if isinstance(fact, Eq) and fact.free_symbols <= hints.keys() and fact.xreplace(hints):
                equalities[fact] = None
    return list(equalities)


def _independent(facts: Sequence[Any], hints: _Sizes) -> list[Any]:
    """Return the facts that do not follow from earlier ones, as far as breaking them shows."""
    independent: list[Any] = []
    known: dict[Any, Any] = {}
    for fact in facts:
        rest = fact.xreplace(known)
        unsolved = any(_solved(other)[0] is None for other in independent)
        if is_true(rest) or (unsolved and not any(_breaking(fact, independent, hints))):
            continue
        independent.append(fact)
        symbol, other = _solved(rest)
        if symbol is not None:
            known = {each: value.xreplace({symbol: other}) for each, value in known.items()}
            known[symbol] = other
    return independent


def _solved(fact: Any) -> tuple[Any, Any]:
    """Return a symbol and the expression it equals, or None twice if no side is a symbol."""
    for symbol, other in ((fact.lhs, fact.rhs), (fact.rhs, fact.lhs)):
        if symbol.is_Symbol and symbol not in other.free_symbols:
            return symbol, other
    return None, None


def _multiple(fact: Any) -> tuple[Any, int] | None:
    """Return a symbol and the number that a fact makes it a multiple of, else None."""
    from torch.utils._sympy.functions import Mod, PythonMod

    if isinstance(fact.lhs, Mod | PythonMod) and fact.rhs == 0:
        symbol, by = fact.lhs.args
        if symbol.is_Symbol and by.is_Integer:
            return symbol, int(by)
    return None


def _breaking(fact: Any, kept: Sequence[Any], hints: _Sizes) -> Iterator[dict[Any, int]]:
    """Yield sizes of at least 2 that break a fact and satisfy the others."""
    drawn = random.Random(0)
    count = 0
    for _ in range(_DRAWS):
        sizes = {symbol: drawn.randrange(2, 2 * size + 8) for symbol, size in hints.items()}
        sizes = satisfying(kept, sizes)
        if _breaks(fact, kept, sizes):
            yield sizes
            count += 1
        if count == _BREAKS:
            return


def _breaks(fact: Any, kept: Sequence[Any], sizes: _Sizes) -> bool:
    """True if, at given sizes, a fact fails and the others hold."""
    try:
        return (
            _least_side((fact, *kept), sizes) >= 2
            and not fact.xreplace(sizes)
            and all(other.xreplace(sizes) for other in kept)
        )
    except ZeroDivisionError:  # one size is divided by another, which is 0 here
        return False


def _least_side(facts: Sequence[Any], sizes: _Sizes) -> int:
    """Return the smallest size in some facts, without the sides of remainder facts."""
    sides = [
        int(side.xreplace(sizes)) for fact in facts if not is_multiple(fact) for side in fact.args
    ]
    return min(sides, default=2)
