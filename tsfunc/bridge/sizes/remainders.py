"""Proves facts about quotients and remainders of sizes.

NOTE [facts from remainders]
If a size has a fixed remainder modulo a period, then ``+``, ``-``, ``*``, and ``//`` and ``%`` by
numbers, make it a polynomial in the quotient: for ``h == 4 * q + 1``, ``(h + -h % 4) // 4`` is ``q
+ 1``. A fact therefore holds for all sizes if it holds for each remainder, and the coefficients of
a polynomial in nonnegative numbers can prove a fact for one remainder.

Private names used here (torch 2.11 to 2.13): ``torch.utils._sympy`` has the ``FloorDiv`` and
``Mod`` of ShapeEnv's expressions, and imports sympy, which takes half a second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

Polynomial = dict[tuple[str, ...], int]  # the coefficient of each product of names

_MOST = 256  # combinations of remainders that are tried


class _NoPolynomial(Exception):
    """An expression is not a polynomial for the given remainders."""


def holds_by_remainders(fact: Any, sizes: Mapping[str, tuple[int, int]]) -> bool:
    """Return True if a comparison provably holds for all sizes: NOTE [facts from remainders].

    Args:
        fact: a sympy relation between named dims.
        sizes: for each name the least size, and the step between sizes.
    """
    from sympy import Eq, Ge, Gt, Le, Lt, Ne

    if not isinstance(fact, Eq | Ne | Ge | Gt | Le | Lt):
        return False
    if isinstance(fact, Le | Lt):
        fact = fact.reversed

    def holds(known: Mapping[str, Polynomial]) -> bool:
        difference = _plus(_polynomial(fact.lhs, known), _polynomial(fact.rhs, known), -1)
        match fact:
            case Eq():
                return not difference
            case Ne():
                return _is_above(difference, 1) or _is_above(_times({(): -1}, difference), 1)
            case _:
                return _is_above(difference, isinstance(fact, Gt))

    for periods in _periods(fact):
        try:
            return all(map(holds, _by_remainders(periods, sizes)))
        except _NoPolynomial:
            continue
    return False


def _periods(fact: Any) -> Iterator[dict[str, int]]:
    """Yield periods by name: common multiples of the divisors of the expressions with the name.

    Nested quotients have a longer period than each of their divisions.
    """
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    divided = [each.args for each in fact.atoms(FloorDiv, Mod, PythonMod)]
    by_name: dict[str, list[int]] = {str(symbol): [] for symbol in fact.free_symbols}
    for value, by in divided:
        for symbol in value.free_symbols:
            by_name[str(symbol)].append(int(by) if by.is_Integer and by > 0 else 1)
    for combined in (math.lcm, lambda *numbers: math.prod(numbers)):
        found = {name: combined(*numbers) for name, numbers in by_name.items()}
        if math.prod(found.values()) <= _MOST:
            yield found


def _by_remainders(
    periods: Mapping[str, int], sizes: Mapping[str, tuple[int, int]]
) -> Iterator[dict[str, Polynomial]]:
    """Yield each size as a polynomial in its quotient, for each combination of remainders."""
    ways: list[list[Polynomial]] = []
    for name, period in periods.items():
        least, step = sizes[name]
        first = -(-least // step) * step
        count = period // math.gcd(period, step)  # the number of possible remainders
        ways.append([{(): first + step * i, (name,): step * count} for i in range(count)])
    for combination in itertools.product(*ways):
        yield dict(zip(periods, combination, strict=True))


def _polynomial(expr: Any, known: Mapping[str, Polynomial]) -> Polynomial:
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    if expr.is_Integer:
        return _plus({}, {(): int(expr)})
    if expr.is_Symbol:
        return _plus({}, known[str(expr)])
    if isinstance(expr, FloorDiv | Mod | PythonMod):
        value, by = expr.args
        quotient, rest = _divided(value, by, known)
        return quotient if isinstance(expr, FloorDiv) else rest
    found: Polynomial
    if expr.is_Add:
        found = {}
        for each in expr.args:
            found = _plus(found, _polynomial(each, known))
        return found
    if expr.is_Mul:
        factors = expr.args
    elif expr.is_Pow and expr.exp.is_Integer and 0 <= expr.exp <= 8:
        factors = [expr.base] * int(expr.exp)
    else:
        raise _NoPolynomial
    found = {(): 1}
    for each in factors:
        found = _times(found, _polynomial(each, known))
    return found


def _divided(value: Any, by: Any, known: Mapping[str, Polynomial]) -> tuple[Polynomial, Polynomial]:
    """Divide by a number that divides all coefficients except that of the constant term."""
    if not (by.is_Integer and by > 0):
        raise _NoPolynomial
    number, terms = int(by), _polynomial(value, known)
    rest = terms.pop((), 0)
    if any(factor % number for factor in terms.values()):
        raise _NoPolynomial
    quotient = {names: factor // number for names, factor in terms.items()}
    return _plus(quotient, {(): rest // number}), _plus({}, {(): rest % number})


def _plus(one: Polynomial, other: Polynomial, times: int = 1) -> Polynomial:
    found = dict(one)
    for names, factor in other.items():
        found[names] = found.get(names, 0) + times * factor
    return {names: factor for names, factor in found.items() if factor}


def _times(one: Polynomial, other: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for (names, factor), (more, by) in itertools.product(one.items(), other.items()):
        found = _plus(found, {tuple(sorted(names + more)): factor * by})
    return found


def _is_above(polynomial: Polynomial, least: int) -> bool:
    """True if a polynomial is provably at least a number, for nonnegative values of its names."""
    return polynomial.get((), 0) >= least and all(factor >= 0 for factor in polynomial.values())
