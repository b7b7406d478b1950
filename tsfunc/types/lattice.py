"""The order of types, of values and of calls: the subtype relation, and least upper bounds.

NOTE [the order of types]
``a`` is a subtype of ``b`` if every value of type ``a`` is allowed where a ``b`` is expected.

- ``Any`` is above all types. A union is above each of its alternatives; ``Optional[X]`` is
  ``X | None``.
- Numbers do not convert: ``bool``, ``int`` and ``float`` are unrelated. ``float`` is below
  ``double``, the type of Python's floats.
- A value is below its class, and a tensor is below its metadata.
- Immutable containers are covariant: tuples, named tuples, futures and remote references. A named
  tuple is below the tuple of its elements.
- Lists and dicts are invariant: a function that takes a ``List[Any]`` can write a string into it.
  Tensor metadata is an exception, because writing does not change it: ``List[f32[3]]`` is below
  ``List[Tensor]``.
- A container with exactly these children is below one of any number: ``[X, X]`` below ``List[X]``.
- A class is below its base classes, so an interface is above the classes derived from it. A class
  that only has the methods of an interface can be passed as one (see ``check``).
- The type of a module is below its class.

Two classes with several common bases, none of which is derived from all others, have no least type
above both; their join is ``Any``. In every other case ``join`` is the least upper bound.

NOTE [the order of descriptors]
``d <= e`` if every call that fits the descriptors ``d`` fits ``e``. The order is that of types on
the record of all parameters, in which a name of a size has one meaning (NOTE [names of sizes]).
Lists and dicts are covariant here, because the order compares the arguments of calls.

A join is above both, does not depend on their order, and is the least one without bounds that
neither side has: the join of the sizes 3 and 4 is a name, not a name from 3 to 4. The join of two
values of one class is the class: ``int`` for ``3`` and ``4``. A join makes no new union, except
with None. The join of two equivalent descriptors is the one whose text sorts first. If one is
below the other, the join is the other.

NOTE [joins of several]
``a.join(b).join(c)`` and ``a.join(b.join(c))`` are equivalent if they have no bounds, expressions
and written unions; the names in them can differ. No useful join guarantees more:

- Names. The join of ``[n, 3]`` and ``[7, 4]`` keeps its name and gives the other dim a new one:
  ``[n, m]``. A further join with ``[7, n]``, which is below it, changes nothing. But ``[7, 4]`` is
  itself below ``[7, n]``, so in the other order the join is that of ``[n, 3]`` and ``[7, n]``
  only, which has ``n`` in the first dim. With ``[8, 3]`` in the same way it has ``n`` in the
  second.
- Bounds. The sizes 3 and 4 fit ``n>=2``, so ``n>=2`` is its own join with either. The join of 3 and
  4 alone is any size, and so is the join of that with ``n>=2``.
- Expressions. ``[2, 4]`` and ``[3, 9]`` fit ``[n, n**2]`` and ``[n, 5*n-6]``: neither is the least.
- Unions. ``int | str`` is above 3 and ``"a"``, but their join is ``Any``.
"""

from __future__ import annotations

import abc
import functools
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.base import SINGLE, Order, TSAllType, TSType, plain
from tsfunc.types.classes import class_type, nominal_type
from tsfunc.types.containers import (
    TSDict,
    TSList,
    TSNamedTuple,
    TSPytree,
    TSTuple,
    TSTupleOf,
    may_be_key,
)
from tsfunc.types.dims import DimForm
from tsfunc.types.grammar import require_type
from tsfunc.types.meta import JoinSizes, MetaTensorType, join_descriptions, wider_of
from tsfunc.types.single import ANY, DOUBLE, FLOAT, NONE, TSModuleType, TSTensor, Value
from tsfunc.types.size_matching import ABSENT, Absent, Generalization, SideForm, SizeMatch
from tsfunc.types.unions import TSUnion, optional
from tsfunc.types.values import same_keys
from tsfunc.user_code import folding


@folding()
def is_subtype(narrower: TSAllType, wider: TSAllType) -> bool:
    """True if values of one type are allowed where another is expected.

    See NOTE [the order of types].

    Example:
        >>> from tsfunc.types import parse
        >>> [is_subtype(parse("int"), parse(wider)) for wider in ("Optional[int]", "float")]
        [True, False]
        >>> is_subtype(parse("f32[3, 3]"), parse("f32[n, n]"))
        True

    Source: the subtypes of TorchScript's types, with Python's classes and descriptions of tensors.
    """
    if narrower == wider:
        return True
    require_type(narrower)
    require_type(wider)
    if not isinstance(wider, TSType):  # the type of one module
        return False
    inner = nominal_view(narrower)
    sizes = SizeMatch(inner.dims)
    return Order(sizes, of_call=False).below(inner, wider) and sizes.is_settled()


def is_below(narrower: Iterable[TSType], wider: Iterable[TSType]) -> bool:
    """True if every call that fits the narrower types fits the wider types.

    See NOTE [the order of descriptors].

    Args:
        wider: the types of the same parameters; names of sizes hold in all of them.
    """
    ones = list(narrower)
    sizes = SizeMatch(dim for alternative in ones for dim in alternative.dims)
    order = Order(sizes, of_call=True)
    return all(order.below(*pair) for pair in zip(ones, wider, strict=True)) and sizes.is_settled()


def nominal_view(type_: TSAllType) -> TSType:
    """Return a type that composes: the class of the type of a module, else the type itself."""
    if isinstance(type_, TSModuleType):
        return nominal_type(type_.cls)
    if not isinstance(type_, TSType):
        raise TypeError(f"expected a type of tsfunc.types, got {type(type_).__name__}")
    return type_


# --- join


@overload
def join(left: TSType, right: TSType, /) -> TSType: ...
@overload
def join(left: TSAllType, right: TSAllType, /) -> TSAllType: ...
@folding()
def join(left: TSAllType, right: TSAllType, /) -> TSAllType:
    """Return the least type that two types are subtypes of.

    The result is the type of a value of either type, as after the branches of a condition. The join
    is ``Any`` if no other type is above both. Nothing can be computed with ``Any``;
    ``join_branches`` raises an error then.

    Example:
        >>> from tsfunc.types import parse
        >>> print(join(parse("int"), parse("None")), join(parse("int"), parse("str")))
        Optional[int] Any
        >>> print(join(parse("Tuple[f32[3, 3], int]"), parse("Tuple[f32[4, 4], int]")))
        Tuple[f32[n1, n1], int]

    Source: the unification of types at the joins of control flow in TorchScript.
    """
    wider = wider_of(left, right, is_subtype(left, right), is_subtype(right, left))
    if wider is not None:
        return wider
    one, other = nominal_view(left), nominal_view(right)
    return _generalize([(one, other)], of_call=False)[0]


def join_pairs(pairs: Sequence[tuple[TSType, TSType]]) -> list[TSType]:
    """Return the join of each pair of parameters' types; names of sizes hold in all pairs."""
    return _generalize(pairs, of_call=True)


def join_parts(left: TSType, right: TSType) -> TSType:
    """Return the least type above the types of two parts of one value.

    Unlike ``join`` it makes no names of sizes: a name states that sizes are equal within a value,
    but the parts of one value have both sizes.

    Example:
        >>> from tsfunc.types import parse
        >>> print(join_parts(parse("f32[1, 1]"), parse("f32[2, 2]")))
        f32[?, ?]
    """
    return left if left == right else _Join(_same_size, of_call=False).of(left, right)


def _generalize(pairs: Sequence[tuple[TSType, TSType]], *, of_call: bool) -> list[TSType]:
    sizes = Generalization(
        (dim for left, _ in pairs for dim in left.dims),
        (dim for _, right in pairs for dim in right.dims),
        always_named=of_call,
    )
    counting = _Join(sizes.count, of_call)
    for pair in pairs:
        counting.of(*pair)
    naming = _Join(sizes.size, of_call)
    return [naming.of(*pair) for pair in pairs]


def _same_size(left: SideForm, right: SideForm) -> DimForm:
    """Join two sizes of one value without new names; a name in both is one size."""
    if isinstance(left, Absent):
        assert not isinstance(right, Absent)
        return right
    return left if isinstance(right, Absent) or left == right else None


@dataclass(frozen=True)
class _Join:
    """The join of two types.

    Attributes:
        of_call: True for types of a call's arguments, see NOTE [the order of descriptors]; False
            for types of the language.
    """

    size: JoinSizes
    of_call: bool

    def of(self, left: TSType, right: TSType) -> TSType:
        """Return the join of two types, neither of which must be below the other."""
        if ANY in (left, right):
            return ANY
        if NONE in (left, right) or left.is_union or right.is_union:
            return self.unions(left, right)
        if left == right and not left.dims:
            return left
        one, other = left.described, right.described
        if one is not None and other is not None:
            classes = (
                torch.Tensor if isinstance(side, Value) else side.value_class or torch.Tensor
                for side in (left, right)
            )
            cls = common_class(*classes) or torch.Tensor
            return TSTensor(cls, join_descriptions(one, other, self.size))
        match left, right:
            case TSPytree(kind, entries, ones), TSPytree(other_kind, other_entries, others) if (
                kind is other_kind and _same_entries(kind, entries, other_entries)
            ):
                types_by_entry = dict(zip(entries, ones, strict=True))
                by_entry = dict(zip(other_entries, others, strict=True))
                both = ordered_intersection(entries, other_entries)
                return TSPytree(
                    kind, both, tuple(self.of(types_by_entry[x], by_entry[x]) for x in both)
                )
            case _ if left.by_parts and left.differs_in_parts(right):
                return left.with_parts(self.join_pairs(left.parts, right.parts))
            case _ if {left, right} == {FLOAT, DOUBLE}:
                return DOUBLE
            case _:
                return self.containers(left, right)

    def join_pairs(self, ones: Sequence[TSType], others: Sequence[TSType]) -> tuple[TSType, ...]:
        """Return the join of each pair of children."""
        return tuple(self.of(*pair) for pair in zip(ones, others, strict=True))

    # --- unions

    def unions(self, left: TSType, right: TSType) -> TSType:
        """Join unions. None besides one alternative is separated; a written union stays a union."""
        ones, others = (
            [choice for choice in side.choices if choice != NONE] for side in (left, right)
        )
        has_none = NONE in (*left.choices, *right.choices)
        if len(ones) <= 1 and len(others) <= 1:
            if ones and others:
                rest = [self.of(ones[0], others[0])]
            else:
                rest = [
                    self.one_sided(alternative, is_left=bool(ones))
                    for alternative in (*ones, *others)
                ]
        else:
            rest = [alternative.map_tensors(_without_names) for alternative in (*ones, *others)]
        if ANY in rest:
            return ANY
        least: list[TSType] = []
        for candidate in rest:
            if not any(is_below([candidate], [other]) for other in least):
                least = [
                    *(other for other in least if not is_below([other], [candidate])),
                    candidate,
                ]
        if has_none and len(least) == 1 and not self.of_call:
            return optional(least[0])
        alternatives = (*sorted(least, key=str), *((NONE,) if has_none else ()))
        return alternatives[0] if len(alternatives) == 1 else TSUnion(alternatives)

    def one_sided(self, type_: TSType, *, is_left: bool) -> TSType:
        """Return the part of a join that only one of the two types has."""

        def alone(one: SideForm, other: SideForm) -> DimForm:
            return self.size(one, ABSENT) if is_left else self.size(ABSENT, one)

        return type_.map_tensors(lambda meta: join_descriptions(meta, meta, alone))

    # --- containers and classes

    def containers(self, left: TSType, right: TSType) -> TSType:
        """Join lists, tuples and dicts; join other types by their classes."""
        ones, others = left.element_types(tuple), right.element_types(tuple)
        if ones is not None and others is not None:
            fixed = not isinstance(left, TSTupleOf) and not isinstance(right, TSTupleOf)
            if not fixed or len(ones) != len(others):
                return TSTupleOf(self.together(ones, others)) if self.of_call else ANY
            joined, names = self.join_pairs(ones, others), left.element_names
            same = names is not None and names == right.element_names
            return TSNamedTuple(names, joined) if names is not None and same else TSTuple(joined)
        written = not self.of_call and left.invariant and right.invariant
        if written and plain(left) != plain(right):
            return ANY
        ones, others = left.element_types(list), right.element_types(list)
        if ones is not None and others is not None:
            return TSList(self.together(ones, others))
        if left.value_class is dict and right.value_class is dict:
            key = self.together(left.key_types, right.key_types)
            item = self.together(left.item_types, right.item_types)
            return TSDict(key if may_be_key(key) else ANY, item)
        return self.classes(left, right)

    def together(self, ones: Sequence[TSType], others: Sequence[TSType]) -> TSType:
        """Return the common type of all elements of two containers."""
        parts = _Join(_same_size, self.of_call)
        one = functools.reduce(parts.of, ones) if ones else None
        other = functools.reduce(parts.of, others) if others else None
        if one is not None and other is not None:
            return self.of(one, other)
        alone = one or other
        return ANY if alone is None else self.one_sided(alone, is_left=one is not None)

    def classes(self, left: TSType, right: TSType) -> TSType:
        """Join by the classes of the values."""
        for cls in SINGLE:
            fits = left.fits_class(cls), right.fits_class(cls)
            if any(fits):
                return class_type(cls) if all(fits) else ANY
        one, other = left.nominal_class, right.nominal_class
        if one is None or other is None:
            return ANY
        common = one if one is other else common_class(one, other)
        if common is None:
            return ANY
        return class_type(common) if self.of_call or common is bool else nominal_type(common)


def _without_names(meta: MetaTensorType) -> MetaTensorType:
    """Make named sizes open: in a union a name can be a size of only one alternative."""

    def opened(size: SideForm, _: SideForm) -> DimForm:
        return size if isinstance(size, int) else None

    return join_descriptions(meta, meta, opened)


def ordered_intersection(ones: Iterable[Any], others: Iterable[Any]) -> tuple[Any, ...]:
    """Return the common elements in their common order; sorted if the two orders differ."""
    one, other = list(ones), list(others)
    left, right = [x for x in one if x in other], [x for x in other if x in one]
    return tuple(left if left == right else sorted(left, key=lambda x: (type(x).__name__, repr(x))))


def _same_entries(kind: type, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return same_keys(ones, others) if kind is dict else tuple(ones) == tuple(others)


# Bases that do not characterize a class, and classes whose instances have separate types.
_NO_CLASSES = frozenset(
    {object, abc.ABC, typing.Generic, typing.Protocol, int, float, str, list, dict, tuple}
)


@functools.lru_cache(maxsize=1024)
def common_class(left: type, right: type) -> type | None:
    """Return the common base class that is derived from all other common ones, or None."""
    common = [cls for cls in left.__mro__ if cls in right.__mro__ and _is_type(cls)]
    least = [cls for cls in common if all(other in cls.__mro__ for other in common)]
    return least[0] if least else None


def _is_type(cls: type) -> bool:
    if cls in _NO_CLASSES:
        return False
    try:
        nominal_type(cls)
    except AnnotationError:
        return False
    return True
