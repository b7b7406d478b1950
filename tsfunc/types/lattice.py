"""The order of types: which is a subtype of which, and the least type above two.

NOTE [the order of types]
``a`` is a subtype of ``b`` if every value of type ``a`` may stand where a ``b`` is asked for.

- `Any` is above all. ``None`` and ``X`` are below ``Optional[X]``.
- Numbers do not convert: ``bool``, ``int`` and ``float`` are unrelated. ``float`` is below
  ``double``, which Python's floats are.
- What can't be written to varies with its elements: tuples, named tuples, futures and remote
  references. A named tuple is below the tuple of its elements.
- Lists and dicts do not: who takes a ``List[int]`` for a ``List[Any]`` may write a string into it.
  What is known of a tensor is no bar, because writing is no matter of it: ``List[f32[3]]`` is
  below ``List[Tensor]``.
- Classes are below those that they are derived from. So an interface is above the classes that
  are derived from it; what merely has its methods may be passed as one (see `check`).
- The type of a module is below its class.

Two classes that have several bases in common, neither derived from the other, have no least type
above both; their join is `Any`. In every other case `join` is the least upper bound.
"""

from __future__ import annotations

import abc
import functools
import typing
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import TypeAlias, overload

import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.classes import nominal_type
from tsfunc.types.dims import DimExpr, DimForm, DimSpec, spell_dim
from tsfunc.types.grammar import (
    ANY,
    DOUBLE,
    FLOAT,
    NONE,
    TSAllType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSModuleType,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSRRef,
    TSTensor,
    TSTuple,
    TSType,
    assert_never,
    children_of_type,
    optional,
    with_children,
)
from tsfunc.types.meta import MetaTensorType, on_device
from tsfunc.types.sizes import ABSENT, Absent, Generalization, Instance, SideForm


def is_subtype(narrower: TSAllType, wider: TSAllType) -> bool:
    """Whether values of one type may stand where another is asked for.

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
    if isinstance(wider, TSModuleType):
        return False
    inner = nominal_view(narrower)
    sizes = Instance(dims_of(inner))
    return _below(inner, wider, sizes) and sizes.settled()


def _below(narrower: TSType, wider: TSType, sizes: Instance) -> bool:
    match wider:
        case TSMetaType():
            return True
        case TSOptional(element):
            inner = _inner(narrower)
            return inner == NONE or _below(inner, element, sizes)
        case TSPrimitiveType():
            return narrower == wider or (narrower == FLOAT and wider == DOUBLE)
        case TSTuple():
            return isinstance(narrower, _TUPLES) and _children_below(narrower, wider, sizes)
        case TSNamedTuple(names):
            return (
                isinstance(narrower, TSNamedTuple)
                and narrower.names == names
                and _children_below(narrower, wider, sizes)
            )
        case TSList() | TSDict():
            return plain(narrower) == plain(wider) and _children_below(narrower, wider, sizes)
        case TSFuture() | TSRRef():
            return type(narrower) is type(wider) and _children_below(narrower, wider, sizes)
        case TSTensor(cls, meta):
            return (
                isinstance(narrower, TSTensor)
                and cls in narrower.cls.__mro__
                and describes_less(narrower.meta, meta, sizes)
            )
        case TSBuiltinClass(cls) | TSCustomClass(cls) | TSEnum(cls) | TSModuleInterface(cls):
            return isinstance(narrower, _CLASSES) and cls in narrower.cls.__mro__
        case _:
            assert_never(wider)


_TUPLES = (TSTuple, TSNamedTuple)
_CLASSES = (TSBuiltinClass, TSCustomClass, TSEnum, TSModuleInterface)


def _children_below(narrower: TSType, wider: TSType, sizes: Instance) -> bool:
    ones, others = children_of_type(narrower), children_of_type(wider)
    return len(ones) == len(others) and all(
        _below(one, other, sizes) for one, other in zip(ones, others, strict=True)
    )


def plain(type_: TSType) -> TSType:
    """A type without the descriptions of its tensors."""
    if isinstance(type_, TSTensor):
        return TSTensor(type_.cls)
    return with_children(type_, map(plain, children_of_type(type_)))


def describes_less(narrower: MetaTensorType, wider: MetaTensorType, sizes: Instance) -> bool:
    """Whether all that `wider` says of a tensor follows from what `narrower` says."""
    for name in _EXACT:
        known = getattr(wider, name)
        if known is not None and getattr(narrower, name) != known:
            return False
    if wider.device is not None and (
        narrower.device is None or not on_device(narrower.device, wider.device)
    ):
        return False
    if wider.strides is not None:
        ones, others = narrower.stride_forms, wider.stride_forms
        if len(ones) != len(others) or not all(map(sizes.fits, ones, others)):
            return False
    return _shapes_below(narrower, wider, sizes)


_EXACT = ("dtype", "requires_grad", "layout", "memory_format")


def _shapes_below(narrower: MetaTensorType, wider: MetaTensorType, sizes: Instance) -> bool:
    if wider.shape is None:
        return True
    if narrower.dims is not None:
        others = wider.dims_of_rank(len(narrower.dims))
        return others is not None and all(map(sizes.fits, narrower.dims, others))
    count = len(wider.trailing)
    return (
        wider.dims is None
        and 0 < count <= len(narrower.trailing)
        and all(map(sizes.fits, narrower.trailing[-count:], wider.trailing))
    )


def dims_of(type_: TSType) -> Iterator[DimForm]:
    """All sizes in a type."""
    if isinstance(type_, TSTensor):
        yield from type_.meta.sizes
    else:
        for child in children_of_type(type_):
            yield from dims_of(child)


# --- join


@overload
def join(left: TSType, right: TSType, /) -> TSType: ...
@overload
def join(left: TSAllType, right: TSAllType, /) -> TSAllType: ...
def join(left: TSAllType, right: TSAllType, /) -> TSAllType:
    """The least type that two types are subtypes of.

    It is the type of what is one or the other, as after the branches of a condition. Where
    nothing else is above both it is `Any`, with which nothing can be computed; `join_branches`
    makes an error of that.

    Example:
        >>> from tsfunc.types import parse
        >>> print(join(parse("int"), parse("None")), join(parse("int"), parse("str")))
        Optional[int] Any
        >>> print(join(parse("Tuple[f32[3, 3], int]"), parse("Tuple[f32[4, 4], int]")))
        Tuple[f32[n1, n1], int]

    Source: the unification of types at the joins of control flow in TorchScript.
    """
    below, above = is_subtype(left, right), is_subtype(right, left)
    if below and above:  # the same but for names of sizes
        return min(left, right, key=str)
    if below or above:
        return right if below else left
    one, other = nominal_view(left), nominal_view(right)
    sizes = Generalization(dims_of(one), dims_of(other))
    _join(one, other, counting(sizes))
    return _join(one, other, sizes.size)


JoinSizes: TypeAlias = Callable[[SideForm, SideForm], DimForm]
"""A function that joins two sizes, one of which may be `ABSENT`."""


def counting(sizes: Generalization) -> JoinSizes:
    """Return a function that counts the pairs of sizes, as a first pass over two types."""

    def count(left: SideForm, right: SideForm) -> DimForm:
        sizes.add(left, right)
        return None

    return count


def same_size(left: SideForm, right: SideForm) -> DimForm:
    """Join two sizes of one value: a name in both is one size, and no new name is made."""
    if isinstance(left, Absent):
        assert not isinstance(right, Absent)
        return right
    return left if isinstance(right, Absent) or left == right else None


def join_parts(left: TSType, right: TSType) -> TSType:
    """Return the least type above the types of two parts of one value.

    Unlike `join` it makes no names of sizes: a name says that sizes are equal within a value, and
    the parts of one value have both sizes.

    Example:
        >>> from tsfunc.types import parse
        >>> print(join_parts(parse("f32[1, 1]"), parse("f32[2, 2]")))
        f32[?, ?]
    """
    return left if left == right else _join(left, right, same_size)


def nominal_view(type_: TSAllType) -> TSType:
    """A type that composes: for the type of a module that of its class."""
    return nominal_type(type_.cls) if isinstance(type_, TSModuleType) else type_


def _join(left: TSType, right: TSType, size: JoinSizes) -> TSType:
    if left == NONE or right == NONE:
        return optional(_one_sided(right if left == NONE else left, right == NONE, size))
    if isinstance(left, TSOptional) or isinstance(right, TSOptional):
        return optional(_join(_inner(left), _inner(right), size))
    if isinstance(left, _TUPLES) and isinstance(right, _TUPLES):
        return _join_tuples(left, right, size)
    if isinstance(left, TSTensor) and isinstance(right, TSTensor):
        cls = common_class(left.cls, right.cls) or torch.Tensor
        return TSTensor(cls, join_descriptions(left.meta, right.meta, size))
    if isinstance(left, _CLASSES) and isinstance(right, _CLASSES):
        base = common_class(left.cls, right.cls)
        return ANY if base is None else nominal_type(base)
    if {left, right} == {FLOAT, DOUBLE}:
        return DOUBLE
    immutable = isinstance(left, TSFuture | TSRRef) and type(left) is type(right)
    return _join_children(left, right, size) if immutable or plain(left) == plain(right) else ANY


def _join_tuples(
    left: TSTuple | TSNamedTuple, right: TSTuple | TSNamedTuple, size: JoinSizes
) -> TSType:
    if len(left.elements) != len(right.elements):
        return ANY
    joined = _join_children(TSTuple(left.elements), TSTuple(right.elements), size)
    names = left.names if isinstance(left, TSNamedTuple) else None
    if names is None or not isinstance(right, TSNamedTuple) or names != right.names:
        return joined
    return TSNamedTuple(names, children_of_type(joined))


def _join_children(left: TSType, right: TSType, size: JoinSizes) -> TSType:
    pairs = zip(children_of_type(left), children_of_type(right), strict=True)
    return with_children(left, [_join(one, other, size) for one, other in pairs])


def _inner(type_: TSType) -> TSType:
    return type_.element if isinstance(type_, TSOptional) else type_


def one_sided(meta: MetaTensorType, is_left: bool, size: JoinSizes) -> MetaTensorType:
    """Return the description of a tensor that only one side of a join has."""

    def alone(one: SideForm, other: SideForm) -> DimForm:
        return size(one, ABSENT) if is_left else size(ABSENT, one)

    return join_descriptions(meta, meta, alone)


def _one_sided(type_: TSType, is_left: bool, size: JoinSizes) -> TSType:
    if isinstance(type_, TSTensor):
        return TSTensor(type_.cls, one_sided(type_.meta, is_left, size))
    children = [_one_sided(child, is_left, size) for child in children_of_type(type_)]
    return with_children(type_, children)


def join_descriptions(
    left: MetaTensorType, right: MetaTensorType, size: JoinSizes
) -> MetaTensorType:
    """Return what is known of both tensors; of different ranks the last dims are kept."""
    known = {
        name: value for name in _EXACT if (value := getattr(left, name)) == getattr(right, name)
    }
    one, other = left.device, right.device
    if one is not None and other is not None and one.type == other.type:
        known["device"] = one if one == other else one.type
    known["shape"] = _join_shapes(left, right, size)
    if len(left.stride_forms) == len(right.stride_forms):
        pairs = zip(left.stride_forms, right.stride_forms, strict=True)
        known["strides"] = [_join_strides(*pair, size) for pair in pairs]
    return MetaTensorType(**known)


def _join_shapes(
    left: MetaTensorType, right: MetaTensorType, size: JoinSizes
) -> list[DimSpec | EllipsisType] | None:
    if left.dims is not None and right.dims is not None and len(left.dims) == len(right.dims):
        return [spell_dim(size(*pair)) for pair in zip(left.dims, right.dims, strict=True)]
    if left.shape is None or right.shape is None:
        return None
    ones, others = (x.trailing if x.dims is None else x.dims for x in (left, right))
    count = min(len(ones), len(others))
    pairs = zip(ones[len(ones) - count :], others[len(others) - count :], strict=True)
    return [..., *(spell_dim(size(*pair)) for pair in pairs)]


def _join_strides(
    left: int | DimExpr | None, right: int | DimExpr | None, size: JoinSizes
) -> int | str | None:
    if isinstance(left, int) and isinstance(right, int):
        return left if left == right else None
    joined = size(left, right)
    return joined.text if isinstance(joined, DimExpr) else None


# Bases that say nothing of what a class is, and classes whose instances have types of their own.
_NO_CLASSES = frozenset(
    {object, abc.ABC, typing.Generic, typing.Protocol, int, float, str, list, dict, tuple}
)


@functools.lru_cache(maxsize=1024)
def common_class(left: type, right: type) -> type | None:
    """The one class that two are derived from and that is derived from all others such."""
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
