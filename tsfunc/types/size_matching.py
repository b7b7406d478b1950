"""Comparison of the sizes of two types: the meaning of each name.

NOTE [names of sizes]
A name states that sizes are equal within one type: ``Tuple[f32[n], f32[n]]`` is two tensors of one
length. ``f32[3]`` is a subtype of ``f32[n]``, with 3 for n, and ``f32[3, 4]`` is not a subtype of
``f32[n, n]``. A name that occurs once, without bounds, means the same as ``?``.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from tsfunc.errors import DescriptorError
from tsfunc.types.dims import Dim, DimForm, parse_dim
from tsfunc.types.sizes import DimExpr, SizeSum


class Absent(enum.Enum):
    """The size of a tensor that only the other one of two types has."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
SideForm: TypeAlias = DimForm | Absent


def all_bounds(dims: Iterable[DimForm]) -> dict[str, Dim]:
    """Return each name with all of its bounds in ``dims``."""
    bounds: dict[str, Dim] = {}
    for dim in dims:
        if isinstance(dim, Dim):
            try:
                bounds[dim.name] = bounds.get(dim.name, dim).meet(dim)
            except DescriptorError:
                bounds[dim.name] = dim  # no size fits, so any of the bounds will do
    return bounds


class SizeMatch:
    """The assignment of a narrower type's sizes to a wider type's names, built up size by size."""

    def __init__(self, narrower: Iterable[DimForm]) -> None:
        self._bounds = all_bounds(narrower)
        self._meaning: dict[str, SizeSum] = {}
        self._pending: list[tuple[DimExpr, SizeSum]] = []
        self._opens: set[str] = set()

    def copy(self) -> SizeMatch:
        """Return a copy, to continue with a type that may not fit."""
        match = SizeMatch(())
        match.adopt(self)
        return match

    def adopt(self, other: SizeMatch) -> None:
        """Take over the state of a copy."""
        self._bounds, self._opens = other._bounds, set(other._opens)
        self._meaning, self._pending = dict(other._meaning), list(other._pending)

    def fits(self, size: DimForm, wider: DimForm) -> bool:
        """True if the wider size allows a size, under the names assigned so far."""
        if wider is None:
            return True
        low, high = self._range(size)
        value = self._sum(size)
        if isinstance(wider, int):
            return low == high == wider
        if isinstance(wider, DimExpr):
            self._pending.append((wider, value))
            return True
        if isinstance(size, Dim):
            allowed = wider.admits_all(self._bounds[size.name])
        else:
            allowed = wider.admits(size) if isinstance(size, int) else not wider.is_bounded
        return allowed and self._meaning.setdefault(wider.name, value) == value

    def is_settled(self) -> bool:
        """True if the computed sizes of the wider type fit too.

        A name that occurs only in expressions is solved for. A name that can't be solved for
        stands for the same name of the narrower type.
        """
        while any(self._solve(*pair) for pair in self._pending):
            pass
        return all(self._holds(*pair) for pair in self._pending)

    def _solve(self, wider: DimExpr, value: SizeSum) -> bool:
        """Assign the only unknown name of an expression; True if that was possible."""
        unknown = [name for name in wider.names if name not in self._meaning]
        if len(unknown) != 1:
            return False
        solution = wider.sum.solve(unknown[0], value, self._meaning)
        ranges = {name: (dim.min or 0, dim.max) for name, dim in self._bounds.items()}
        if solution is None or solution.least(ranges) < 0:
            return False
        self._meaning[unknown[0]] = solution
        return True

    def _holds(self, wider: DimExpr, value: SizeSum) -> bool:
        """True if an expression has a value in terms of the narrower type's sizes."""
        meaning = {name: self._meaning.get(name, SizeSum.of_name(name)) for name in wider.names}
        has_open = any(not self._opens.isdisjoint(sum_.names) for sum_ in meaning.values())
        return not has_open and wider.sum.substitute(meaning) == value

    def _range(self, size: DimForm) -> tuple[int, int | None]:
        if isinstance(size, int):
            return size, size
        if isinstance(size, Dim):
            dim = self._bounds[size.name]
            return dim.min or 0, dim.max
        return 0, None

    def _sum(self, size: DimForm) -> SizeSum:
        low, high = self._range(size)
        if low == high:
            return SizeSum.of_int(low)
        if size is None:  # every open size differs from all others
            name = f"?{len(self._opens)}"
            self._opens.add(name)
            return SizeSum.of_name(name)
        return sum_of(size)


class Generalization:
    """The common sizes of two types.

    A pair of sizes that occurs at several paths is the same size there, and gets one name. All
    pairs are first counted by ``count``; ``size`` then returns the generalized size of a pair. A
    pair that occurs once is open, or named too with ``always_named``. An expression is kept if it
    has the names of pairs and holds on both sides. Bounds are kept if they hold on both sides;
    numbers do not become bounds.

    Source: least general generalization, Plotkin, "A note on inductive generalization" (1970).
    """

    def __init__(
        self, left: Iterable[DimForm], right: Iterable[DimForm], *, always_named: bool
    ) -> None:
        self._always_named = always_named
        ones, others = list(left), list(right)
        self._sides = all_bounds(ones), all_bounds(others)
        self._used = {name for dim in (*ones, *others) for name in names_of_dim(dim)}
        self._counts: Counter[tuple[SideForm, SideForm]] = Counter()
        self._one_sided_names: set[tuple[int, str]] = set()
        self._names: dict[tuple[SideForm, SideForm], str] = {}

    def count(self, left: SideForm, right: SideForm) -> None:
        """Count a pair; ``ABSENT`` stands for the size of a tensor that one side does not have."""
        if left is ABSENT or right is ABSENT:
            side = int(left is ABSENT)
            size = (left, right)[side]
            assert not isinstance(size, Absent)
            self._one_sided_names |= {(side, name) for name in names_of_dim(size)}
        elif left is not None and right is not None:
            self._counts[_without_bounds(left), _without_bounds(right)] += 1

    def size(self, left: SideForm, right: SideForm) -> DimForm:
        """Return the narrowest size that both sizes are instances of."""
        if left is None or right is None:
            return None
        if left is ABSENT or right is ABSENT:
            return self._one_sided((left, right)[int(left is ABSENT)], int(left is ABSENT))
        assert not isinstance(left, Absent) and not isinstance(right, Absent)
        if isinstance(left, int) and left == right:
            return left
        pair = _without_bounds(left), _without_bounds(right)
        computed = self._computed(pair)
        if computed is not None:
            return computed
        bounds = self._bounds(left, right)
        if self._is_named(pair) or (bounds is not None and bounds.is_bounded):
            return replace(bounds or Dim("n"), name=self._name(pair))
        return None

    def _one_sided(self, size: SideForm, side: int) -> DimForm:
        """Return a size that only one side has, in terms of the names at other paths."""
        if isinstance(size, Dim):
            pair = self._pair_of(Dim(size.name), side)
            if pair is not None:
                return self.size(*pair)
            alone = (Dim(size.name), ABSENT) if side == 0 else (ABSENT, Dim(size.name))
            bounds = self._sides[side].get(size.name, size)
            return replace(bounds, name=self._name(alone))
        if isinstance(size, DimExpr):
            pair = self._pair_of(size, side)
            if pair is not None:
                return self.size(*pair)
            forms = {name: self._one_sided(Dim(name), side) for name in size.names}
            if None in forms.values():
                return None
            return parse_dim(size.substitute({name: _text(form) for name, form in forms.items()}))
        assert not isinstance(size, Absent)
        return size

    def _pair_of(self, size: DimForm, side: int) -> tuple[SideForm, SideForm] | None:
        """Return the first named pair with this size on a side, or None."""
        pairs = (pair for pair in self._counts if _is_same_size(pair[side], size))
        return next((pair for pair in pairs if self._is_named(pair)), None)

    def _is_named(self, pair: tuple[SideForm, SideForm]) -> bool:
        """True if the pair has a name for another reason than its bounds."""
        same = isinstance(pair[0], Dim) and pair[0] == pair[1]
        names = {(i, name) for i in (0, 1) for name in names_of_dim(pair[i])}
        return (
            self._always_named
            or same
            or self._counts[pair] > 1
            or not names.isdisjoint(self._one_sided_names)
        )

    def _bounds(self, left: DimForm, right: DimForm) -> Dim | None:
        """Return the bounds of either side that hold on both sides."""
        if isinstance(left, Dim) and isinstance(right, Dim):
            return self._sides[0][left.name].hull(self._sides[1][right.name])
        if isinstance(left, Dim) and isinstance(right, int):
            return self._sides[0][left.name].bounds_of(right)
        if isinstance(left, int) and isinstance(right, Dim):
            return self._sides[1][right.name].bounds_of(left)
        return None

    def _computed(self, pair: tuple[SideForm, SideForm]) -> DimExpr | None:
        """Return an expression in names of pairs that gives the pair on both sides, or None."""
        texts = [
            text
            for side in (0, 1)
            if isinstance(expression := pair[side], DimExpr)
            for text in self._in_names(expression, side, pair[1 - side])
        ]
        return DimExpr(min(texts, key=lambda text: (len(text), text))) if texts else None

    def _in_names(self, expression: DimExpr, side: int, other: SideForm) -> Iterator[str]:
        """Yield one side's expression in names of pairs if it equals the other side's ``other``."""
        pairs = [
            [pair for pair in self._counts if pair[side] == Dim(name) and self._is_named(pair)]
            for name in expression.names
        ]
        for chosen in itertools.islice(itertools.product(*pairs), _MOST_CHOICES):
            meant = dict(zip(expression.names, chosen, strict=True))
            texts_on_other_side = {name: _text(pair[1 - side]) for name, pair in meant.items()}
            if _is_same_size(other, parse_size(expression.substitute(texts_on_other_side))):
                new_names = {name: self._name(pair) for name, pair in meant.items()}
                yield expression.substitute(new_names)

    def _name(self, pair: tuple[SideForm, SideForm]) -> str:
        if isinstance(pair[0], Dim) and pair[0] == pair[1]:
            return pair[0].name
        new_name = self._names.get(pair)
        if new_name is None:
            equal_names = {
                left.name for left, right in self._counts if isinstance(left, Dim) and left == right
            }
            taken = {*equal_names, *self._names.values()}
            dim_names = sorted(dim.name for dim in pair if isinstance(dim, Dim))
            usual = ("n", "m", "k") if self._always_named else ()
            new = itertools.chain(usual, (f"n{i}" for i in itertools.count(1)))
            names = itertools.chain(dim_names, (name for name in new if name not in self._used))
            new_name = next(name for name in names if name not in taken)
            self._names[pair] = new_name
        return new_name


_MOST_CHOICES = 64
"""The maximum number of assignments of an expression's names that are tried."""


def names_of_dim(dim: SideForm) -> tuple[str, ...]:
    return dim.names if isinstance(dim, DimExpr) else (dim.name,) if isinstance(dim, Dim) else ()


def parse_size(text: str) -> DimForm:
    """Return the size that a text describes; None if it is invalid, such as a division by zero."""
    try:
        return parse_dim(text)
    except DescriptorError:
        return None


def _is_same_size(one: SideForm, other: DimForm) -> bool:
    """True if two sizes are equal for all values of their names."""
    if one is None or other is None or isinstance(one, Absent):
        return False
    return sum_of(one) == sum_of(other)


def sum_of(size: int | Dim | DimExpr) -> SizeSum:
    """Return the normal form of a size."""
    if isinstance(size, DimExpr):
        return size.sum
    return SizeSum.of_name(size.name) if isinstance(size, Dim) else SizeSum.of_int(size)


def _text(size: SideForm) -> str:
    """Return a size as text in which a name has no bounds."""
    return str(_without_bounds(size) if not isinstance(size, Absent) else size)


def _without_bounds(size: DimForm) -> DimForm:
    """Return a name without its bounds; other sizes are returned unchanged."""
    return Dim(size.name) if isinstance(size, Dim) else size
