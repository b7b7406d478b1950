"""Proves constraints on quotients and remainders of sizes.

NOTE [constraints from remainders]
If a size has a fixed remainder modulo a period, then ``+``, ``-``, ``*``, and ``//`` and ``%`` by
numbers, make it a polynomial in the quotient: for ``h == 4 * q + 1``, ``(h + -h % 4) // 4`` is ``q
+ 1``. A constraint therefore holds for all sizes if it holds for each remainder, and the
coefficients of a polynomial in nonnegative numbers can prove a constraint for one remainder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tsfunc.bridge.sizes.expressions import form_of_expr
from tsfunc.types.sizes import SizeSum

_MOST = 256  # combinations of remainders that are tried


def holds_by_remainders(constraint: Any, sizes: Mapping[str, tuple[int, int]]) -> bool:
    """True if a comparison provably holds for all sizes: NOTE [constraints from remainders].

    Args:
        constraint: a sympy relation between named dims.
        sizes: for each name the least size, and the step between sizes.
    """
    from sympy import Eq, Ge, Gt, Le, Lt, Ne

    if not isinstance(constraint, Eq | Ne | Ge | Gt | Le | Lt):
        return False
    if isinstance(constraint, Le | Lt):
        constraint = constraint.reversed
    names = {symbol: str(symbol) for symbol in constraint.free_symbols}
    forms = [form_of_expr(side, names) for side in (constraint.lhs, constraint.rhs)]
    if None in forms:
        return False
    left, right = map(SizeSum.of_form, forms)
    difference = left - right

    def holds(sums: Mapping[str, SizeSum]) -> bool | None:
        """Return None if the difference is not a polynomial for these sizes."""
        polynomial = difference.substitute(sums)
        if any(polynomial.operations()):
            return None
        match constraint:
            case Eq():
                return not polynomial.terms
            case Ne():
                return polynomial.least({}) >= 1 or (-polynomial).least({}) >= 1
            case _:
                return polynomial.least({}) >= isinstance(constraint, Gt)

    for periods in _periods(difference):
        holding = list(map(holds, _by_remainders(periods, sizes)))
        if None not in holding:
            return all(holding)
    return False


def _periods(difference: SizeSum) -> Iterator[dict[str, int]]:
    """Yield periods by name: common multiples of the divisors of the expressions with the name.

    Nested quotients have a longer period than each of their divisions.
    """
    by_name: dict[str, list[int]] = {name: [] for name in sorted(difference.names)}
    for operation in difference.operations():
        value, by = operation.operands
        for name in value.names:
            by_name[name].append(max(by.number or 1, 1))
    for combined in (math.lcm, lambda *numbers: math.prod(numbers)):
        periods = {name: combined(*numbers) for name, numbers in by_name.items()}
        if math.prod(periods.values()) <= _MOST:
            yield periods


def _by_remainders(
    periods: Mapping[str, int], sizes: Mapping[str, tuple[int, int]]
) -> Iterator[dict[str, SizeSum]]:
    """Yield each size as a sum in its quotient, for each combination of remainders."""
    ways: list[list[SizeSum]] = []
    for name, period in periods.items():
        least, step = sizes[name]
        first = -(-least // step) * step
        count = period // math.gcd(period, step)  # the number of possible remainders
        steps = SizeSum.of_name(name) * SizeSum.of_int(step * count)
        ways.append([steps + SizeSum.of_int(first + step * i) for i in range(count)])
    for combination in itertools.product(*ways):
        yield dict(zip(periods, combination, strict=True))
