"""Descriptors that satisfy the constraints that a trace relies on, for errors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tsfunc.bridge.sizes.bounds import (
    choices,
    dim_constraints,
    holds_at,
    holds_for_all,
    period_of,
    smallest,
    with_least_minima,
)
from tsfunc.bridge.sizes.expressions import divisions, moduli, python_text
from tsfunc.bridge.sizes.symbols import Constraint
from tsfunc.errors import DescriptorError
from tsfunc.types import Dim, DimExpr
from tsfunc.types.descriptor_sets import with_dims
from tsfunc.types.dims import DimSpec
from tsfunc.types.grammar import Descriptor

# --- descriptions of one named dim for which a constraint holds: bounds, or an expression of other
# dims


_MANY = 4096  # maximum number of sizes that are tried one by one
_MOST = 1 << 40  # a size that stands for all larger ones


@dataclass(frozen=True)
class Solution:
    """A dim as an expression of others.

    Attributes:
        name: the name of the dim.
        others: dims in the expression that have new bounds, or that are new.
        sizes: the sizes of the new dims in the call.
    """

    name: str
    value: Any
    others: Sequence[Dim] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


def bounded_dim(constraint: Any, dim: Dim, size: int) -> Dim | int | None:
    """Return a dim for which a constraint on it alone holds, and which admits the size of the call.

    If the size of the call does not satisfy the constraint, a size that does replaces it.

    Returns:
        The dim, or the size that the constraint fixes it to; None if no description was found.
    """
    from sympy import Eq, Ne

    if (
        isinstance(constraint, Eq)
        and not moduli(constraint)
        and size < 2
        and holds_at(constraint, {dim.name: size})
    ):
        return size
    if not (dim.admits(size) and size >= 2 and holds_at(constraint, {dim.name: size})):
        size = next(
            (n for n in range(2, _MANY) if dim.admits(n) and holds_at(constraint, {dim.name: n})), 0
        )
        if not size:
            return None
    for candidate in _candidates(constraint, dim, size, Eq, Ne):
        try:
            suggested = dim.meet(candidate) if isinstance(candidate, Dim) else candidate
        except DescriptorError:
            continue
        if isinstance(suggested, int):
            return suggested
        if suggested.admits(size) and _seems_guaranteed(constraint, suggested):
            return _dim_for_trials(constraint, suggested, size)
    return None


def _dim_for_trials(constraint: Any, dim: Dim, size: int) -> Dim:
    """Return the dim, bounded to sizes that can be tried if its bounds do not suffice."""
    if holds_for_all(constraint, {dim.name: dim}):
        return dim
    few = dim.meet(Dim(dim.name, max=smallest(dim) + _MANY - 1))
    return few if few.admits(size) and holds_for_all(constraint, {dim.name: few}) else dim


def _seems_guaranteed(constraint: Any, dim: Dim) -> bool:
    """True if a constraint holds for the sizes that a dim allows, as far as trials show."""
    if holds_for_all(constraint, {dim.name: dim}):
        return True
    step = dim.multiple_of or 1
    low = smallest(dim)
    low += -low % step
    most = _MOST if dim.max is None else dim.max
    tried = {*range(low, min(low + 64 * step, most + 1), step), most - most % step}
    return all(holds_at(constraint, {dim.name: n}) for n in tried if dim.admits(n))


def _candidates(constraint: Any, dim: Dim, size: int, eq: Any, ne: Any) -> Iterator[Dim | int]:
    from sympy import Integer, Or

    name = dim.name

    def at(n: int) -> bool:
        return holds_at(constraint, {name: n})

    if isinstance(constraint, eq) or moduli(constraint):
        yield from [
            Dim(name, multiple_of=step) for step in _multiples_in(constraint) if size % step == 0
        ]
    if (
        isinstance(constraint, eq)
        and not at(size + 1)
        and not at(size - 1)
        and not moduli(constraint)
    ):
        yield size
    if isinstance(constraint, Or):  # a broadcast with a number: the size is 1 or the number
        numbers = [int(number) for number in constraint.atoms(Integer) if number >= 0]
        yield Dim(name, one_of=tuple(n for n in {*numbers, size} if at(n)))
    low = _boundary(at, size, 2)
    high = _boundary(at, size, _MOST)
    yield Dim(name, min=low if low > 2 else None, max=high if high < _MOST else None)
    if isinstance(constraint, ne):
        yield Dim(name, min=size)
        yield Dim(name, max=size)
    yield size


def _multiples_in(constraint: Any) -> list[int]:
    """Return the numbers that a size may have to be a multiple of, the smallest first."""
    from sympy.core.relational import Relational

    period = (
        period_of(constraint.lhs - constraint.rhs) if isinstance(constraint, Relational) else None
    )
    if period is None or period > _MANY:
        return moduli(constraint)
    return [step for step in range(2, period + 1) if period % step == 0]


def stepped_dims(
    constraint: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Sequence[Dim] | None:
    """Return several dims as multiples of their divisors: ``h`` and ``w`` in patches of 4.

    Returns:
        The dims; None if the constraint does not hold for them, or they do not admit the call's
        sizes.
    """
    in_steps = {name: dims[name] for name in names}
    for name, step in divisions(constraint):
        try:
            in_steps[name] = in_steps[name].meet(Dim(name, multiple_of=step))
        except DescriptorError:
            return None
    fits = all(dim.admits(sizes[name]) for name, dim in in_steps.items())
    return list(in_steps.values()) if fits and holds_for_all(constraint, in_steps) else None


def leaving_remainder(
    constraint: Any, dim: Dim, size: int, used_names: Container[str]
) -> Solution | None:
    """Return a dim as an expression with its remainder in the call: ``2 * extra + 1``.

    Args:
        constraint: a constraint on this dim alone.

    Returns:
        The solution, or None if there is none.
    """
    from sympy import Symbol

    extra = next(name for name in _extra_names() if name not in used_names)
    for step in _multiples_in(constraint):
        value = step * Symbol(extra) + size % step
        said = constraint.xreplace(dict.fromkeys(constraint.free_symbols, value))
        if size % step and holds_for_all(said, {extra: Dim(extra)}):
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


def equated_dim(
    constraint: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Solution | None:
    """Return one of several dims as an expression of the others, if an equality implies it."""
    from sympy import Eq, Symbol

    for case in choices(constraint) if isinstance(constraint, Eq) else ():
        if not holds_at(case, sizes):
            continue
        for name in reversed(names):
            value = _solved_for(case, name)
            if value is None or not holds_at(Eq(Symbol(name), value), sizes):
                continue
            rest = constraint.xreplace(
                {s: value for s in constraint.free_symbols if str(s) == name}
            )
            if holds_for_all(rest, dims):
                return Solution(name, value)
            others = [str(symbol) for symbol in rest.free_symbols]
            if len(others) == 1:
                dim = bounded_dim(rest, dims[others[0]], sizes[others[0]])
                if isinstance(dim, Dim):
                    return Solution(name, value, [dim])
    return None


def ordered_dim(
    constraint: Any, names: Sequence[str], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Solution | None:
    """Return one of several dims as a lower bound plus a new dim: ``b + extra`` for ``a >= b``."""
    from sympy import Symbol

    surplus = _surplus(constraint, sizes)
    if surplus is None or not holds_at(surplus >= 0, sizes):
        return None
    extra = next(name for name in _extra_names() if name not in {*dims, *sizes})
    dims_with_extra = {**dims, extra: Dim(extra)}
    for name in names:
        least = Symbol(name) - surplus
        value = least + Symbol(extra)
        if Symbol(name) in least.free_symbols or as_dim_spec(value) is None:
            continue
        others = _with_larger_minima(least, dims[name], dims_with_extra, sizes)
        if others is not None:
            size = int(surplus.subs({Symbol(other): sizes[other] for other in names}))
            return Solution(name, value, [*others, dims_with_extra[extra]], {extra: size})
    return None


def _with_larger_minima(
    least: Any, dim: Dim, dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> Iterable[Dim] | None:
    """Return dims with larger minima, so that the lower bound of another meets its minimum.

    Returns:
        The dims; None if this is not possible, or if they do not admit the sizes of the call.
    """
    if dim.max is not None or dim.multiple_of is not None or dim.one_of is not None:
        return None
    names = sorted(str(symbol) for symbol in least.free_symbols)
    larger = with_least_minima(least >= (dim.min or 0), {name: dims[name] for name in names})
    if larger is None or not all(dim.admits(sizes[dim.name]) for dim in larger.values()):
        return None
    return larger.values()


def _surplus(constraint: Any, sizes: Mapping[str, int]) -> Any:
    """Return a polynomial that is not negative if an inequality holds; else None."""
    from sympy import Ge, Gt, Le, Lt, Ne, expand

    if not isinstance(constraint, Ge | Gt | Le | Lt | Ne):
        return None
    difference = expand(constraint.lhs - constraint.rhs)
    if not difference.is_polynomial(*difference.free_symbols):
        return None
    if isinstance(constraint, Le | Lt) or (
        isinstance(constraint, Ne) and not holds_at(difference > 0, sizes)
    ):
        difference = -difference
    return difference if isinstance(constraint, Ge | Le) else difference - 1


def _extra_names() -> Iterator[str]:
    return itertools.chain(["extra"], (f"extra{i}" for i in itertools.count(2)))


def _solved_for(constraint: Any, name: str) -> Any:
    """Return the value of a dim from an equality; None if a descriptor can't express it."""
    from sympy import Symbol, solve

    symbols = {str(symbol): symbol for symbol in constraint.free_symbols}
    if name not in symbols:
        return None
    free = Symbol(name)
    difference = (constraint.lhs - constraint.rhs).xreplace({symbols[name]: free})
    solutions = solve(difference, free) if difference.is_polynomial(free) else []
    return solutions[0] if len(solutions) == 1 and as_dim_spec(solutions[0]) is not None else None


def as_dim_spec(value: Any) -> DimSpec:
    """Return an expression in the syntax of descriptors; None if they can't express it."""
    if value.is_Integer:
        return int(value) if value >= 0 else None
    try:
        text = python_text(value)
        return text if value.is_Symbol else DimExpr(text).text
    except DescriptorError:
        return None


# --- descriptors that guarantee the constraints on named dims that a trace relies on


def text_of_fixes(suggested: Mapping[str, DimSpec], described: Mapping[str, Descriptor]) -> str:
    """Return the descriptors for which the constraints hold, as Python code."""
    items = ", ".join(
        f"{parameter!r}: {with_dims(descriptor, suggested).as_python()}"
        for parameter, descriptor in described.items()
    )
    opened = sorted(name for name, dim in suggested.items() if dim is None)
    also = (
        f"\n(No descriptor says it of {', '.join(opened)}: left open, None, each size has a "
        f"program of its own.)"
        if opened
        else ""
    )
    return f"These descriptors guarantee it:\n  {{{items}}}{also}"


def suggested_dims(
    unmet: Sequence[Constraint], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> dict[str, DimSpec]:
    """Return a dim that guarantees the constraints for each dim in them; None leaves it open."""
    constraints = sorted(dict.fromkeys(constraint.expr for constraint in unmet), key=_rank)
    for with_new in (True, False):
        suggestion = _Suggestion(dims, sizes, with_new)
        for constraint in [
            constraint for constraint in constraints if not suggestion.satisfy(constraint)
        ]:
            suggestion.satisfy_or_open(constraint)  # more dims are known by now
        suggestion.open_beside_open(constraints)
        if suggestion.is_expressible():
            break
    return suggestion.result()


def _rank(constraint: Any) -> int:
    """Return the order of a constraint: dims that are numbers first, then equalities between dims.

    Bounds of one dim come next, and inequalities between dims last.
    """
    from sympy import Eq

    if len(constraint.free_symbols) > 1:
        return 1 if isinstance(constraint, Eq) else 3
    is_number = isinstance(constraint, Eq) and (
        constraint.lhs.is_Symbol or constraint.rhs.is_Symbol
    )
    return 0 if is_number else 2


class _Suggestion:
    """The changes of dims that make constraints hold, one constraint after the other."""

    def __init__(self, dims: Mapping[str, Dim], sizes: Mapping[str, int], with_new: bool) -> None:
        self.given, self.with_new = dims, with_new  # with_new: whether new names are allowed
        self.dims, self.sizes = dict(dims), dict(sizes)
        self.bounded: dict[str, Dim] = {}
        self.solved: dict[str, Any] = {}  # dims that are expressions of others, or fixed
        self.opened: set[str] = set()

    def satisfy_or_open(self, constraint: Any) -> None:
        """Make a constraint hold, or leave its dims open."""
        if not self.satisfy(constraint):
            self.opened.update(map(str, self._in_terms_of_others(constraint).free_symbols))

    def open_beside_open(self, constraints: Sequence[Any]) -> None:
        """Open the dims that constraints tie to open dims: their relation differs by size."""
        before = -1
        while len(self.opened) != before:
            before = len(self.opened)
            for name, value in self.solved.items():
                if not self.opened.isdisjoint(map(str, value.free_symbols)):
                    self.opened.add(name)
            dims = {name: Dim(name) if name in self.opened else d for name, d in self.dims.items()}
            for constraint in constraints:
                names = set(map(str, constraint.free_symbols))
                if not self.opened.isdisjoint(names) and not holds_for_all(constraint, dims):
                    self.opened |= names

    def satisfy(self, constraint: Any) -> bool:
        """Make a constraint hold; return False if descriptors can't express it."""
        constraint = self._in_terms_of_others(constraint)
        names = sorted(
            (str(symbol) for symbol in constraint.free_symbols), key=list(self.dims).index
        )
        if not self.opened.isdisjoint(names) or holds_for_all(constraint, self.dims):
            return True
        if len(names) == 1:
            return self._satisfy_by_bounds(constraint, names[0])
        solution = equated_dim(constraint, names, self.dims, self.sizes)
        steps = (
            None if solution is not None else stepped_dims(constraint, names, self.dims, self.sizes)
        )
        if steps is not None:
            self._bound(*steps)
            return True
        if solution is None and self.with_new:
            solution = ordered_dim(constraint, names, self.dims, self.sizes)
        return solution is not None and self._satisfy_by_solution(solution)

    def _satisfy_by_solution(self, solution: Solution) -> bool:
        """Replace a dim by an expression of others; these have to keep its guarantees."""
        self._bound(*solution.others)
        self.sizes.update(solution.sizes)
        self._solve(solution.name, solution.value)
        constraints = dim_constraints(self.dims[solution.name])
        for constraint in (*self._is_size(solution.value), *constraints):
            if not self.satisfy(constraint) and not self._satisfy_above_call(constraint):
                self.satisfy_or_open(constraint)
        return True

    def _is_size(self, value: Any) -> list[Any]:
        """Return the constraints that make an expression a valid size.

        The expression must not be negative. If raising the minima of its dims can't guarantee
        this, its minimum is the size in the call, up to 2: NOTE [small sizes] covers the
        sizes 0 and 1.
        """
        from sympy import Ge

        names = [str(symbol) for symbol in value.free_symbols]
        size, constraint = (
            int(value.subs({name: self.sizes.get(name, 0) for name in names})),
            Ge(value, 0),
        )
        if with_least_minima(constraint, {name: self.dims[name] for name in names}) is None:
            return [Ge(value, min(size, 2))]
        return [constraint]

    def _satisfy_above_call(self, constraint: Any) -> bool:
        """Make a constraint hold by the call's sizes as minima; return False if it does not."""
        constraint = self._in_terms_of_others(constraint)
        about = {str(symbol): self.dims[str(symbol)] for symbol in constraint.free_symbols}
        larger = {
            name: dataclasses.replace(dim, min=max(dim.min or 0, self.sizes.get(name, 0)))
            for name, dim in about.items()
        }
        if not holds_for_all(constraint, larger):
            return False
        self._bound(*larger.values())
        return True

    def _satisfy_by_bounds(self, constraint: Any, name: str) -> bool:
        from sympy import Integer

        dim, size = self.dims[name], self.sizes.get(name, 0)
        suggested = bounded_dim(constraint, dim, size)
        is_range = isinstance(suggested, Dim) and (
            suggested.max is None or suggested.max == dim.max
        )
        if self.with_new and not is_range:
            solution = leaving_remainder(constraint, dim, size, {*self.dims, *self.sizes})
            if solution is not None:
                return self._satisfy_by_solution(solution)
        if (
            isinstance(suggested, Dim)
            and suggested.max is not None
            and suggested.min == suggested.max
        ):
            suggested = suggested.max
        if isinstance(suggested, Dim):
            self._bound(suggested)
        elif suggested is not None:
            self._solve(name, Integer(suggested))
        return suggested is not None

    def _in_terms_of_others(self, expr: Any) -> Any:
        from sympy import Symbol

        return expr.xreplace({Symbol(name): value for name, value in self.solved.items()})

    def _bound(self, *suggested: Dim) -> None:
        dims = {dim.name: dim for dim in suggested}
        self.dims.update(dims)
        self.bounded.update(dims)

    def _solve(self, name: str, value: Any) -> None:
        from sympy import Symbol

        for each, known in self.solved.items():
            self.solved[each] = known.xreplace({Symbol(name): value})
        self.solved[name] = value

    def is_expressible(self) -> bool:
        """True if no new name has bounds, since a new name is not a dim of any shape."""
        return not any(dim.is_bounded for name, dim in self.bounded.items()
                       if name not in self.given)  # fmt: skip

    def result(self) -> dict[str, DimSpec]:
        opened = [name for name in self.opened if name in self.given]
        sizes: dict[str, DimSpec] = {**self.bounded, **dict.fromkeys(opened)}
        for name, value in self.solved.items():
            names = map(str, value.free_symbols)
            sizes[name] = as_dim_spec(value) if self.opened.isdisjoint(names) else None
        return sizes
