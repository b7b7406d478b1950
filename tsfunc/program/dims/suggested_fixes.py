"""Descriptors that promise the facts about named dims that a trace relies on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import holds, promises_of, with_larger
from tsfunc.bridge.sizes.symbols import Need
from tsfunc.program.dims.solutions import (
    Solution,
    bounded,
    equated,
    leaving_remainder,
    ordered,
    spelled,
    stepped,
)
from tsfunc.types import Dim
from tsfunc.types.descriptor_sets import as_python, with_dims
from tsfunc.types.dims import DimSpec
from tsfunc.types.grammar import Descriptor


def text_of_fixes(suggested: Mapping[str, DimSpec], described: Mapping[str, Descriptor]) -> str:
    """Return the descriptors for which the facts hold, as Python code."""
    items = ", ".join(
        f"{parameter!r}: {as_python(with_dims(descriptor, suggested))}"
        for parameter, descriptor in described.items()
    )
    opened = sorted(name for name, dim in suggested.items() if dim is None)
    also = (
        f"\n(No descriptor says it of {', '.join(opened)}: left open, None, each size has a "
        f"program of its own.)"
        if opened
        else ""
    )
    return f"These descriptors promise it:\n  {{{items}}}{also}"


def suggested_dims(
    needs: Sequence[Need], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> dict[str, DimSpec]:
    """Return for each dim in the needs a dim that promises them; None: the dim is left open."""
    facts = sorted(dict.fromkeys(need.expr for need in needs), key=_rank)
    for with_new in (True, False):
        suggestion = _Suggestion(dims, sizes, with_new)
        for fact in [fact for fact in facts if not suggestion.satisfy(fact)]:
            suggestion.satisfy_or_open(fact)  # more dims are known by now
        suggestion.open_beside_open(facts)
        if suggestion.is_expressible():
            break
    return suggestion.result()


def _rank(fact: Any) -> int:
    """Return the order of a fact: dims that are numbers first, then equalities between dims.

    Bounds of one dim come next, and inequalities between dims last.
    """
    from sympy import Eq

    if len(fact.free_symbols) > 1:
        return 1 if isinstance(fact, Eq) else 3
    is_number = isinstance(fact, Eq) and (fact.lhs.is_Symbol or fact.rhs.is_Symbol)
    return 0 if is_number else 2


class _Suggestion:
    """The changes of dims that make facts hold, one fact after the other."""

    def __init__(self, dims: Mapping[str, Dim], sizes: Mapping[str, int], with_new: bool) -> None:
        self.given, self.with_new = dims, with_new  # with_new: whether new names are allowed
        self.dims, self.sizes = dict(dims), dict(sizes)
        self.bounded: dict[str, Dim] = {}
        self.solved: dict[str, Any] = {}  # dims that are expressions of others, or fixed
        self.opened: set[str] = set()

    def satisfy_or_open(self, fact: Any) -> None:
        """Make a fact hold, or leave its dims open."""
        if not self.satisfy(fact):
            self.opened.update(map(str, self._in_terms_of_others(fact).free_symbols))

    def open_beside_open(self, facts: Sequence[Any]) -> None:
        """Open the dims that facts tie to open dims, since their relation differs for each size."""
        before = -1
        while len(self.opened) != before:
            before = len(self.opened)
            for name, value in self.solved.items():
                if not self.opened.isdisjoint(map(str, value.free_symbols)):
                    self.opened.add(name)
            dims = {name: Dim(name) if name in self.opened else d for name, d in self.dims.items()}
            for fact in facts:
                names = set(map(str, fact.free_symbols))
                if not self.opened.isdisjoint(names) and not holds(fact, dims):
                    self.opened |= names

    def satisfy(self, fact: Any) -> bool:
        """Make a fact hold; return False if descriptors can't express it."""
        fact = self._in_terms_of_others(fact)
        names = sorted((str(symbol) for symbol in fact.free_symbols), key=list(self.dims).index)
        if not self.opened.isdisjoint(names) or holds(fact, self.dims):
            return True
        if len(names) == 1:
            return self._satisfy_by_bounds(fact, names[0])
        solution = equated(fact, names, self.dims, self.sizes)
        steps = None if solution is not None else stepped(fact, names, self.dims, self.sizes)
        if steps is not None:
            self._bound(*steps)
            return True
        if solution is None and self.with_new:
            solution = ordered(fact, names, self.dims, self.sizes)
        return solution is not None and self._satisfy_by_solution(solution)

    def _satisfy_by_solution(self, solution: Solution) -> bool:
        """Replace a dim by an expression of others; these have to keep its promises."""
        self._bound(*solution.others)
        self.sizes.update(solution.sizes)
        self._solve(solution.name, solution.value)
        for promise in (*self._is_size(solution.value), *promises_of(self.dims[solution.name])):
            if not self.satisfy(promise) and not self._satisfy_above_call(promise):
                self.satisfy_or_open(promise)
        return True

    def _is_size(self, value: Any) -> list[Any]:
        """Return the facts that make an expression a valid size.

        The expression must not be negative. If raising the minima of its dims can't guarantee
        this, its minimum is the size in the call, up to 2: NOTE [small sizes] covers the
        sizes 0 and 1.
        """
        from sympy import Ge

        names = [str(symbol) for symbol in value.free_symbols]
        size, fact = (
            int(value.subs({name: self.sizes.get(name, 0) for name in names})),
            Ge(value, 0),
        )
        if with_larger(fact, {name: self.dims[name] for name in names}) is None:
            return [Ge(value, min(size, 2))]
        return [fact]

    def _satisfy_above_call(self, fact: Any) -> bool:
        """Make a fact hold by the sizes of the call as minima; return False if they do not."""
        fact = self._in_terms_of_others(fact)
        about = {str(symbol): self.dims[str(symbol)] for symbol in fact.free_symbols}
        raised = {
            name: dataclasses.replace(dim, min=max(dim.min or 0, self.sizes.get(name, 0)))
            for name, dim in about.items()
        }
        if not holds(fact, raised):
            return False
        self._bound(*raised.values())
        return True

    def _satisfy_by_bounds(self, fact: Any, name: str) -> bool:
        from sympy import Integer

        dim, size = self.dims[name], self.sizes.get(name, 0)
        suggested = bounded(fact, dim, size)
        is_range = isinstance(suggested, Dim) and (
            suggested.max is None or suggested.max == dim.max
        )
        if self.with_new and not is_range:
            solution = leaving_remainder(fact, dim, size, {*self.dims, *self.sizes})
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
        found = {dim.name: dim for dim in suggested}
        self.dims.update(found)
        self.bounded.update(found)

    def _solve(self, name: str, value: Any) -> None:
        from sympy import Symbol

        for each, known in self.solved.items():
            self.solved[each] = known.xreplace({Symbol(name): value})
        self.solved[name] = value

    def is_expressible(self) -> bool:
        """Return True if no new name has bounds, since a new name is not a dim of any shape."""
        return not any(dim.is_bounded for name, dim in self.bounded.items()
                       if name not in self.given)  # fmt: skip

    def result(self) -> dict[str, DimSpec]:
        opened = [name for name in self.opened if name in self.given]
        found: dict[str, DimSpec] = {**self.bounded, **dict.fromkeys(opened)}
        for name, value in self.solved.items():
            names = map(str, value.free_symbols)
            found[name] = spelled(value) if self.opened.isdisjoint(names) else None
        return found
