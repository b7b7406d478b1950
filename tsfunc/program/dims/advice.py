"""Descriptors that promise what a trace has asked of named dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import holds, promises_of
from tsfunc.bridge.sizes.symbols import Need
from tsfunc.program.dims.solutions import bounded, equated, ordered, spelled
from tsfunc.types import Dim
from tsfunc.types.descriptors import Descriptor
from tsfunc.types.dims import DimSpec
from tsfunc.types.mending import as_python, with_dims


def advice(
    needs: Sequence[Need],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
) -> str:
    """The descriptors for which the facts hold, as Python."""
    mended = _mended(needs, dims, sizes)
    items = ", ".join(
        f"{parameter!r}: {as_python(with_dims(descriptor, mended))}"
        for parameter, descriptor in described.items()
    )
    opened = sorted(name for name, dim in mended.items() if dim is None)
    also = (
        f"\n(No descriptor says it of {', '.join(opened)}: left open, None, each size has a "
        f"program of its own.)"
        if opened
        else ""
    )
    return f"These descriptors promise it:\n  {{{items}}}{also}"


def _mended(
    needs: Sequence[Need], dims: Mapping[str, Dim], sizes: Mapping[str, int]
) -> dict[str, DimSpec]:
    """For each dim of which something was asked, one that promises it; None: an open one."""
    mending = _Mending(dims, sizes)
    facts = sorted(dict.fromkeys(need.expr for need in needs), key=_rank)
    for fact in [fact for fact in facts if not mending.take(fact)]:
        mending.take_or_open(fact)  # more is known by now
    return mending.result()


def _rank(fact: Any) -> int:
    """Dims that are numbers come first, then those that are others.

    Of what is left some are bounded, and then put in order.
    """
    from sympy import Eq

    if len(fact.free_symbols) > 1:
        return 1 if isinstance(fact, Eq) else 3
    is_number = isinstance(fact, Eq) and (fact.lhs.is_Symbol or fact.rhs.is_Symbol)
    return 0 if is_number else 2


class _Mending:
    """What dims become so that facts hold, one fact after the other."""

    def __init__(self, dims: Mapping[str, Dim], sizes: Mapping[str, int]) -> None:
        self.dims, self.sizes = dict(dims), dict(sizes)
        self.bounded: dict[str, Dim] = {}
        self.solved: dict[str, Any] = {}  # those that are said in terms of others, or fixed
        self.opened: set[str] = set()

    def take_or_open(self, fact: Any) -> None:
        """Has a fact hold, or leaves open what it speaks of."""
        if not self.take(fact):
            self.opened.update(map(str, self._in_terms_of_others(fact).free_symbols))

    def take(self, fact: Any) -> bool:
        """Has a fact hold; returns whether that can be said."""
        fact = self._in_terms_of_others(fact)
        names = sorted((str(symbol) for symbol in fact.free_symbols), key=list(self.dims).index)
        if not self.opened.isdisjoint(names) or holds(fact, self.dims):
            return True
        if len(names) == 1:
            return self._take_bounds(fact, names[0])
        said = equated(fact, names, self.dims, self.sizes)
        if said is None:
            said = ordered(fact, names, self.dims, self.sizes)
        if said is None:
            return False
        self._bound(*said.others)
        self.sizes.update(said.sizes)
        self._solve(said.name, said.value)
        for promise in promises_of(self.dims[said.name]):  # others promise it from now on
            if not self.take(promise) and not self._take_above_call(promise):
                self.take_or_open(promise)
        return True

    def _take_above_call(self, fact: Any) -> bool:
        """Has a fact hold by the sizes of the call, which no others are smaller than."""
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

    def _take_bounds(self, fact: Any, name: str) -> bool:
        from sympy import Integer

        mended = bounded(fact, self.dims[name], self.sizes.get(name, 0))
        if isinstance(mended, Dim) and mended.max is not None and mended.min == mended.max:
            mended = mended.max
        if isinstance(mended, Dim):
            self._bound(mended)
        elif mended is not None:
            self._solve(name, Integer(mended))
        return mended is not None

    def _in_terms_of_others(self, expr: Any) -> Any:
        from sympy import Symbol

        return expr.xreplace({Symbol(name): value for name, value in self.solved.items()})

    def _bound(self, *mended: Dim) -> None:
        found = {dim.name: dim for dim in mended}
        self.dims.update(found)
        self.bounded.update(found)

    def _solve(self, name: str, value: Any) -> None:
        from sympy import Symbol

        for each, known in self.solved.items():
            self.solved[each] = known.xreplace({Symbol(name): value})
        self.solved[name] = value

    def result(self) -> dict[str, DimSpec]:
        found: dict[str, DimSpec] = {**self.bounded, **dict.fromkeys(self.opened)}
        for name, value in self.solved.items():
            names = map(str, value.free_symbols)
            found[name] = spelled(value) if self.opened.isdisjoint(names) else None
        return found
