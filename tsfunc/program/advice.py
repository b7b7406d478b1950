"""Descriptors that promise what a trace has asked of named dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.bridge.bounds import holds
from tsfunc.bridge.symbols import Need
from tsfunc.program.solutions import bounded, equated, ordered, spelled
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
    # What is equal to another is that one; what is left is bounded, and then put in order.
    for sort in (_equates, _is_of_one, _is_of_several):
        for fact in dict.fromkeys(need.expr for need in needs):
            if sort(fact):
                mending.take(fact)
    return mending.result()


def _equates(fact: Any) -> bool:
    from sympy import Eq

    return isinstance(fact, Eq) and len(fact.free_symbols) > 1


def _is_of_one(fact: Any) -> bool:
    return len(fact.free_symbols) == 1


def _is_of_several(fact: Any) -> bool:
    return len(fact.free_symbols) > 1 and not _equates(fact)


class _Mending:
    """What dims become so that facts hold, one fact after the other."""

    def __init__(self, dims: Mapping[str, Dim], sizes: Mapping[str, int]) -> None:
        self.dims, self.sizes = dict(dims), dict(sizes)
        self.bounded: dict[str, Dim] = {}
        self.solved: dict[str, Any] = {}  # those that are said in terms of others, or fixed
        self.opened: set[str] = set()

    def take(self, fact: Any) -> None:
        """Has a fact hold, or leaves open what it speaks of."""
        fact = self._in_terms_of_others(fact)
        names = sorted((str(symbol) for symbol in fact.free_symbols), key=list(self.dims).index)
        if not self.opened.isdisjoint(names) or holds(fact, self.dims):
            return
        if len(names) == 1:
            self._take_bounds(fact, names[0])
            return
        said = equated(fact, names, self.dims, self.sizes)
        if said is None:
            said = ordered(fact, names, self.dims, self.sizes)
        if said is None:
            self.opened.update(names)
            return
        self._bound(*said.others)
        self.sizes.update(said.sizes)
        self._solve(said.name, said.value)

    def _take_bounds(self, fact: Any, name: str) -> None:
        from sympy import Integer

        mended = bounded(fact, self.dims[name], self.sizes.get(name, 0))
        if isinstance(mended, Dim):
            self._bound(mended)
        elif mended is None:
            self.opened.add(name)
        else:
            self._solve(name, Integer(mended))

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
