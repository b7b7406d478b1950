"""Sizes that an operator takes only where they are equal.

Of what an operator asks (NOTE [questions of operators] in ``fake_results``) an equality of two
sizes is told apart: two names are two sizes, and a function that takes them only where they are one
needs descriptors that say so. Whether an operator needs an equality is seen by breaking it: sizes
that keep all others that it asked for, and not this one, are all refused. Sizes of 0 and 1, which
broadcast, say nothing of others.

Private names used here (torch 2.11 to 2.13): ``torch.utils._sympy`` has ``Mod`` and ``PythonMod``,
the remainders of sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import is_true

_BREAKS = 3  # sizes that break an equality, each to be refused
_DRAWS = 24  # attempts to find such sizes
_Sizes = Mapping[Any, int]


def required(asked: Sequence[Any], here: _Sizes, takes: Callable[[_Sizes], bool]) -> list[Any]:
    """The equalities among some questions that an operator needs.

    Args:
        asked: what it asked, of sympy's relations.
        here: the sizes at which it did, by symbol.
        takes: whether the operator takes other sizes.
    """
    facts = _independent(_equalities(asked, here), here)
    found = []
    for fact in facts:
        kept = [other for other in facts if other is not fact]
        broken = list(_breaking(fact, kept, here))
        if broken and not any(map(takes, broken)):
            found.append(fact)
    return found


def or_one(fact: Any, here: _Sizes, takes: Callable[[_Sizes], bool]) -> Any:
    """That a size is a number; or 1, where the operator takes that as well and broadcasts it.

    Args:
        fact: an equality that the operator needs.
        here, takes: as of :func:`required`.
    """
    from sympy import Eq, Or

    symbol, number = _solved(fact)
    if symbol is None or not number.is_Integer or not takes({**here, symbol: 1}):
        return fact
    return Or(fact, Eq(symbol, 1))


def is_multiple(fact: Any) -> bool:
    """Whether an equality is one of a remainder with 0."""
    from torch.utils._sympy.functions import Mod, PythonMod

    return bool(fact.has(Mod, PythonMod))


def keeping(facts: Sequence[Any], sizes: _Sizes) -> dict[Any, int]:
    """Sizes of which some equalities hold, as far as these say what a symbol is."""
    kept = dict(sizes)
    for _ in facts:  # each may change what another has read
        for symbol, by in filter(None, map(_multiple, facts)):
            kept[symbol] = max(kept[symbol] - kept[symbol] % by, by)
        for symbol, value in map(_solved, facts):
            if symbol is not None and value.free_symbols <= kept.keys():
                kept[symbol] = int(value.xreplace(kept))
    return kept


def _equalities(asked: Sequence[Any], here: _Sizes) -> list[Any]:
    """Equalities of sizes that hold, as parts of what was asked."""
    from sympy import And, Eq, Ne

    found: dict[Any, None] = {}
    for question in dict.fromkeys(asked):
        for part in sorted(And.make_args(question), key=str):
            fact = Eq(*part.args) if isinstance(part, Ne) else part
            if isinstance(fact, Eq) and fact.free_symbols <= here.keys() and fact.xreplace(here):
                found[fact] = None
    return list(found)


def _independent(facts: Sequence[Any], here: _Sizes) -> list[Any]:
    """Those that do not follow from the ones before them, as far as breaking them shows."""
    found: list[Any] = []
    known: dict[Any, Any] = {}
    for fact in facts:
        rest = fact.xreplace(known)
        unsolved = any(_solved(other)[0] is None for other in found)
        if is_true(rest) or (unsolved and not any(_breaking(fact, found, here))):
            continue
        found.append(fact)
        symbol, other = _solved(rest)
        if symbol is not None:
            known = {each: value.xreplace({symbol: other}) for each, value in known.items()}
            known[symbol] = other
    return found


def _solved(fact: Any) -> tuple[Any, Any]:
    """A symbol, and what it equals; nothing where neither side is one."""
    for symbol, other in ((fact.lhs, fact.rhs), (fact.rhs, fact.lhs)):
        if symbol.is_Symbol and symbol not in other.free_symbols:
            return symbol, other
    return None, None


def _multiple(fact: Any) -> tuple[Any, int] | None:
    """A symbol and the number that it is a multiple of, where a fact says that."""
    from torch.utils._sympy.functions import Mod, PythonMod

    if isinstance(fact.lhs, Mod | PythonMod) and fact.rhs == 0:
        symbol, by = fact.lhs.args
        if symbol.is_Symbol and by.is_Integer:
            return symbol, int(by)
    return None


def _breaking(fact: Any, kept: Sequence[Any], here: _Sizes) -> Iterator[dict[Any, int]]:
    """Sizes of 2 and more at which a fact does not hold, and others do."""
    drawn = random.Random(0)
    found = 0
    for _ in range(_DRAWS):
        sizes = {symbol: drawn.randrange(2, 2 * size + 8) for symbol, size in here.items()}
        sizes = keeping(kept, sizes)
        if _breaks(fact, kept, sizes):
            yield sizes
            found += 1
        if found == _BREAKS:
            return


def _breaks(fact: Any, kept: Sequence[Any], sizes: _Sizes) -> bool:
    """Whether of some facts all hold at some sizes but for the first."""
    try:
        return (
            _least_side((fact, *kept), sizes) >= 2
            and not fact.xreplace(sizes)
            and all(other.xreplace(sizes) for other in kept)
        )
    except ZeroDivisionError:  # a size among them is divided by another, which is 0 here
        return False


def _least_side(facts: Sequence[Any], sizes: _Sizes) -> int:
    """The smallest size that some facts speak of; remainders are none."""
    sides = [
        int(side.xreplace(sizes)) for fact in facts if not is_multiple(fact) for side in fact.args
    ]
    return min(sides, default=2)
