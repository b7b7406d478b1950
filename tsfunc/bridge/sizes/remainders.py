"""Facts about quotients and remainders of sizes.

NOTE [facts by remainders]
Of sizes that leave one remainder by a period, what is made of them by ``+``, ``-``, ``*``, and by
``//`` and ``%`` with numbers, is a polynomial in how often the period goes into them: for
``h == 4 * q + 1``, ``(h + -h % 4) // 4`` is ``q + 1``. So a fact holds for all sizes if it does for
each remainder, and of a polynomial in numbers that are not negative that is seen.

Private names used here (torch 2.11 to 2.13): ``torch.utils._sympy`` has the ``FloorDiv`` and
``Mod`` of ShapeEnv's expressions, and imports sympy, which takes half a second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

Polynomial = dict[tuple[str, ...], int]  # what each product of names is multiplied by

_MOST = 256  # combinations of remainders that are looked at


class _NoPolynomial(Exception):
    """An expression is none, for sizes that leave some remainders."""


def holds_by_remainders(fact: Any, sizes: Mapping[str, tuple[int, int]]) -> bool:
    """Whether it can be seen that a comparison holds for all sizes: NOTE [facts by remainders].

    Args:
        fact: of sympy, about named dims.
        sizes: of each name the least size, and the step from one size to the next.
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
    """Numbers, a name each, that all may go into by which something made of the name is divided.

    A quotient that is divided again has a longer period than either division.
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
    """For each combination of remainders, each size by how often its period goes into it."""
    ways: list[list[Polynomial]] = []
    for name, period in periods.items():
        least, step = sizes[name]
        first = -(-least // step) * step
        count = period // math.gcd(period, step)  # of the remainders that there are
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
    """Quotient and remainder by a number that goes into all but what is there without names."""
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
    """Whether it is no less than a number, whatever its names are that are not negative."""
    return polynomial.get((), 0) >= least and all(factor >= 0 for factor in polynomial.values())
