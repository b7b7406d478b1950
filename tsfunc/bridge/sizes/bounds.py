"""Decides constraints on expressions in the names of dims, for all sizes that the dims allow.

torch's modules of size expressions import sympy, which takes half a second, so they are imported at
the first use.

NOTE [constraints from remainders]
If a size has a fixed remainder modulo a period, then ``+``, ``-``, ``*``, and ``//`` and ``%`` by
numbers, make it a polynomial in the quotient: for ``h == 4 * q + 1``, ``(h + -h % 4) // 4`` is ``q
+ 1``. A constraint therefore holds for all sizes if it holds for each remainder, and the
coefficients of a polynomial in nonnegative numbers can prove a constraint for one remainder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tsfunc.bridge.sizes.expressions import form_of_expr
from tsfunc.types import Dim
from tsfunc.types.sizes import SizeSum

_MOST_COMBINATIONS = 4096  # combinations of sizes that are tried one by one
_LARGEST_LEAST_SIZE = 64  # no larger least size is tried
_UNBOUNDED = 1 << 40  # the number of steps that stands for a size without a maximum


def smallest(dim: Dim) -> int:
    """Return the least size of a named dim in a program; 0 and 1 have programs of their own."""
    return max(2, dim.min or 0)


def holds_for_all(constraint: Any, dims: Mapping[str, Dim]) -> bool:
    """True if a constraint provably holds for all sizes that the dims allow.

    If there are few combinations of sizes, each is tried. Otherwise the proof uses the multiples
    that the dims guarantee, the bounds of both sides of a comparison, or the remainders of the
    sizes.
    """
    names = sorted(str(symbol) for symbol in constraint.free_symbols)
    ranges = [_few_sizes(dims[name]) for name in names]
    every: list[Sequence[int]] = [sizes for sizes in ranges if sizes is not None]
    if len(every) == len(names) and math.prod(map(len, every)) <= _MOST_COMBINATIONS:
        combinations = itertools.product(*every)
        return all(
            holds_at(constraint, dict(zip(names, combination, strict=True)))
            for combination in combinations
        )
    if is_true(in_steps(constraint, dims)) or _holds_by_bounds(constraint, dims):
        return True
    steps = {name: (smallest(dims[name]), dims[name].multiple_of or 1) for name in names}
    return holds_by_remainders(constraint, steps)


def with_least_minima(constraint: Any, dims: Mapping[str, Dim]) -> dict[str, Dim] | None:
    """Return the dims with the least larger minimum for which a constraint holds, or None.

    None means that the constraint holds for no minimum below 64.
    """
    for low in range(2, _LARGEST_LEAST_SIZE):
        if any(dim.max is not None and dim.max < low for dim in dims.values()):
            return None
        larger = {name: replace(dim, min=max(low, dim.min or 0)) for name, dim in dims.items()}
        if holds_for_all(constraint, larger):
            return {name: dim for name, dim in larger.items() if (dims[name].min or 2) < low}
    return None


def without_common_factor(constraint: Any, dims: Mapping[str, Dim]) -> Any:
    """Divide both sides of a comparison by a common factor: ``b*t != b`` is ``t != 1``.

    The factor is positive for all sizes that the dims allow.
    """
    from sympy import cancel, gcd
    from sympy.core.relational import Relational

    if not isinstance(constraint, Relational) or 0 in (constraint.lhs, constraint.rhs):
        return constraint
    factor = gcd(constraint.lhs, constraint.rhs)
    if lower_bound(factor, dims) <= 0:
        return constraint
    return constraint.func(cancel(constraint.lhs / factor), cancel(constraint.rhs / factor))


def holds_at(constraint: Any, sizes: Mapping[str, int]) -> bool:
    return bool(constraint.subs({symbol: sizes[str(symbol)] for symbol in constraint.free_symbols}))


def dim_constraints(dim: Dim) -> list[Any]:
    """Return the constraints that a dim guarantees about its size."""
    from sympy import Eq, Ge, Le, Or, Symbol
    from torch.utils._sympy.functions import Mod

    size = Symbol(dim.name)
    if dim.one_of is not None:
        return [Or(*(Eq(size, number) for number in dim.one_of))]
    constraints = [] if dim.min is None else [Ge(size, dim.min)]
    if dim.max is not None:
        constraints.append(Le(size, dim.max))
    if dim.multiple_of is not None:
        constraints.append(Eq(Mod(size, dim.multiple_of), 0))
    return constraints


def _few_sizes(dim: Dim) -> Sequence[int] | None:
    """Return the sizes that a dim allows if they are few, else None."""
    low = smallest(dim)
    if dim.max is None or dim.max - low >= _MOST_COMBINATIONS:
        return dim.one_of  # None if all sizes within the bounds are allowed
    return [size for size in range(low, dim.max + 1) if dim.admits(size)]


def is_true(constraint: Any) -> bool:
    """True if a constraint has simplified to true."""
    return bool(constraint == True)  # noqa: E712 - sympy has a true of its own


def in_steps(expr: Any, dims: Mapping[str, Dim]) -> Any:
    """Return an expression with each dim replaced by its multiple times a number of steps."""
    return expr.xreplace(
        {
            symbol: (dims[str(symbol)].multiple_of or 1) * _number_of_steps(symbol)
            for symbol in expr.free_symbols
        }
    )


def any_size(dim: Dim) -> Any:
    """Return an expression for any size of a dim, divisible by the dim's ``multiple_of``."""
    from sympy import Symbol

    return (dim.multiple_of or 1) * _number_of_steps(Symbol(dim.name))


def any_number(kind: type[int] | type[float]) -> Any:
    """Return an expression for any number that an argument may be."""
    from sympy import Dummy

    return Dummy(integer=True) if kind is int else Dummy(real=True)


def _number_of_steps(symbol: Any) -> Any:
    from sympy import Symbol

    return Symbol(f"_{symbol}", integer=True, positive=True)


def lower_bound(expr: Any, dims: Mapping[str, Dim]) -> float:
    """Return a lower bound of an expression in the names of dims, -inf if none is found."""
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = {}
    for symbol in expr.free_symbols:
        dim = dims[str(symbol)]
        step = dim.multiple_of or 1
        most = _UNBOUNDED if dim.max is None else dim.max // step
        ranges[_number_of_steps(symbol)] = ValueRanges(-(-smallest(dim) // step), most)
    try:
        return float(bound_sympy(in_steps(expr, dims), ranges).lower)
    except Exception:  # the expression has functions without bounds
        return -math.inf


def has_maximum(constraint: Any) -> bool:
    """True if a constraint contains a maximum of sizes."""
    from torch.utils._sympy.functions import Max

    return bool(constraint.has(Max))


def _holds_by_bounds(constraint: Any, dims: Mapping[str, Dim]) -> bool:
    from sympy import Eq, Ge, Gt, Ne, expand

    constraint = _without_choices(constraint, dims)
    products = _without_quotient(constraint, dims)
    if products:
        return all(_holds_by_bounds(product, dims) for product in products)
    match constraint:
        case Eq():
            return bool(expand(constraint.lhs - constraint.rhs) == 0)
        case Ne():
            difference = constraint.lhs - constraint.rhs
            return lower_bound(difference, dims) > 0 or lower_bound(-difference, dims) > 0
        case Gt() | Ge():
            return lower_bound(constraint.lhs - constraint.rhs, dims) >= isinstance(constraint, Gt)
        case _:
            return is_true(constraint)


def _without_quotient(constraint: Any, dims: Mapping[str, Dim]) -> Sequence[Any]:
    """Rewrite a constraint with one quotient in products: ``p // q >= k`` as ``p >= k * q``.

    The result is empty if the constraint has no or several quotients, or if the divisor may be
    below 1.
    """
    from sympy import Eq, Ge, Gt, expand
    from torch.utils._sympy.functions import FloorDiv

    quotients = constraint.atoms(FloorDiv)
    if len(quotients) != 1 or not isinstance(constraint, Eq | Ge | Gt):
        return []
    (quotient,) = quotients
    difference = expand(constraint.lhs - constraint.rhs)
    sign = difference.coeff(quotient)
    bound = expand(difference - sign * quotient) * -sign
    dividend, divisor = quotient.args
    if sign not in (1, -1) or bound.has(FloorDiv) or lower_bound(divisor, dims) < 1:
        return []
    strictly = int(isinstance(constraint, Gt))
    from_below = Ge(expand(dividend - (bound + strictly) * divisor), 0)
    from_above = Gt(expand((bound + 1 - strictly) * divisor - dividend), 0)
    if isinstance(constraint, Eq):
        return [from_below, from_above]
    return [from_below if sign == 1 else from_above]


def _without_choices(constraint: Any, dims: Mapping[str, Dim]) -> Any:
    """Resolve each maximum and minimum in a constraint whose largest or smallest size is known."""
    from torch.utils._sympy.functions import Max, Min

    def largest_of(*sizes: Any) -> Any:
        return next((size for size in sizes if _is_largest(size, sizes, dims)), Max(*sizes))

    def smallest_of(*sizes: Any) -> Any:
        rest = [-size for size in sizes]
        return next((size for size in sizes if _is_largest(-size, rest, dims)), Min(*sizes))

    simpler = constraint.replace(Min, smallest_of).replace(Max, largest_of)
    return simpler if simpler == constraint else _without_choices(simpler, dims)


def period_of(expr: Any) -> int | None:
    """Return an amount by which a size may grow so that an expression grows linearly, or None.

    None means that no such amount is known: the expression has products of sizes, or other
    functions.
    """
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    if expr.is_Symbol or expr.is_Integer:
        return 1
    if isinstance(expr, FloorDiv | Mod | PythonMod):
        inner, by = expr.args
        period = period_of(inner)
        return period * int(by) if period is not None and by.is_Integer and by > 0 else None
    if expr.is_Mul and sum(1 for term in expr.args if term.free_symbols) > 1:
        return None
    if not (expr.is_Add or expr.is_Mul):
        return None
    periods = [period_of(factor) for factor in expr.args]
    return (
        None if None in periods else math.lcm(*(period for period in periods if period is not None))
    )


def _is_largest(one: Any, sizes: Sequence[Any], dims: Mapping[str, Dim]) -> bool:
    return all(one == other or lower_bound(one - other, dims) >= 0 for other in sizes)


def choices(constraint: Any) -> Iterator[Any]:
    """Yield a constraint with each maximum and minimum replaced by each of its sizes."""
    from torch.utils._sympy.functions import Max, Min

    inner = [atom for atom in constraint.atoms(Min, Max) if not _has_choice(atom.args)]
    if not inner:
        yield constraint
        return
    first = min(inner, key=str)
    for size in sorted(first.args, key=str):
        yield from choices(constraint.xreplace({first: size}))


def _has_choice(sizes: Sequence[Any]) -> bool:
    from torch.utils._sympy.functions import Max, Min

    return any(size.has(Min, Max) for size in sizes)


# --- remainders


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
