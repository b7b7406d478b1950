"""What a descriptor says of a value: its class, the tensor that it is, what it contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.types.descriptors import (
    Anything,
    Descriptor,
    DictOf,
    FieldsOf,
    InstanceOf,
    ListOf,
    NamedOf,
    Nested,
    OfType,
    OneOf,
    TensorOf,
    TupleOf,
    Value,
)
from tsfunc.types.dims import DimForm
from tsfunc.types.grammar import assert_never
from tsfunc.types.inference import names_of_class, primitive_of
from tsfunc.types.meta import MetaTensorType


def meta_of(descriptor: Descriptor) -> MetaTensorType | None:
    """What a descriptor promises of a tensor; None if it promises none."""
    match descriptor:
        case MetaTensorType():
            return descriptor
        case TensorOf(meta=meta):
            return meta
        case Value(value) if isinstance(value, torch.Tensor):
            return MetaTensorType.of(value)
        case InstanceOf(cls) if issubclass(cls, torch.Tensor):
            return MetaTensorType()
        case _:
            return None


def class_of(descriptor: Descriptor) -> type | None:
    """The class of all values that keep a descriptor; None if there is no one class."""
    match descriptor:
        case MetaTensorType():
            return torch.Tensor
        case TensorOf(cls) | InstanceOf(cls) | FieldsOf(cls):
            return cls
        case Value(value):
            return type(value)
        case ListOf():
            return list
        case TupleOf() | NamedOf():
            return tuple
        case DictOf():
            return dict
        case Nested(kind):
            return kind
        case Anything() | OfType() | OneOf():
            return None
        case _:
            assert_never(descriptor)


SINGLE = (int, float, str)


def fits_class(descriptor: Descriptor, cls: type) -> bool:
    """Whether what keeps a descriptor is of a class.

    In the language a bool is no int, and nor is the member of an enum.
    """
    own = class_of(descriptor)
    if own is None or not issubclass(own, cls):
        return False
    if cls not in SINGLE or own is cls:
        return True
    primitive = primitive_of(descriptor.value) if isinstance(descriptor, Value) else None
    return str(primitive) == cls.__name__


def elements_of(descriptor: Descriptor, kind: type) -> Sequence[Descriptor] | None:
    """What the elements of a container of a kind are; None if it is none."""
    match descriptor:
        case ListOf(element) | TupleOf(element) if class_of(descriptor) is kind:
            return (element,)
        case Nested(own, _, children) if issubclass(own, kind):
            return children
        case NamedOf(_, children) if kind is tuple:
            return children
        case _:
            return None


def entries_of(descriptor: Descriptor, kind: type) -> Sequence[Any]:
    fits = isinstance(descriptor, Nested) and issubclass(descriptor.kind, kind)
    return descriptor.entries if isinstance(descriptor, Nested) and fits else ()


def names_of(descriptor: Descriptor) -> tuple[str, ...] | None:
    """The names of a named tuple's elements."""
    if isinstance(descriptor, NamedOf):
        return descriptor.names
    return names_of_class(descriptor.kind) if isinstance(descriptor, Nested) else None


def dims_in(descriptor: Descriptor) -> list[DimForm]:
    """All sizes that a descriptor speaks of."""
    found: list[DimForm] = []

    def add(meta: MetaTensorType) -> MetaTensorType:
        found.extend(meta.sizes)
        return meta

    map_metas(descriptor, add)
    return found


def keys_of(descriptor: Descriptor) -> list[Descriptor]:
    if isinstance(descriptor, DictOf):
        return [descriptor.key]
    return [Value(entry) for entry in entries_of(descriptor, dict)]


def items_of(descriptor: Descriptor) -> list[Descriptor]:
    """What the values of a dict are."""
    if isinstance(descriptor, DictOf):
        return [descriptor.item]
    return list(descriptor.children) if isinstance(descriptor, Nested) else []


def map_metas(
    descriptor: Descriptor, func: Callable[[MetaTensorType], MetaTensorType]
) -> Descriptor:
    """A descriptor with each description of a tensor in it replaced."""
    match descriptor:
        case MetaTensorType():
            return func(descriptor)
        case TensorOf(cls, meta):
            return TensorOf(cls, func(meta))
        case Anything() | InstanceOf() | OfType() | Value():
            return descriptor
        case ListOf(element) | TupleOf(element):
            return type(descriptor)(map_metas(element, func))
        case DictOf(key, item):
            return DictOf(key, map_metas(item, func))
        case OneOf(alternatives):
            return OneOf(tuple(map_metas(each, func) for each in alternatives))
        case Nested(kind, entries, children):
            return Nested(kind, entries, tuple(map_metas(each, func) for each in children))
        case NamedOf(names, children):
            return NamedOf(names, tuple(map_metas(each, func) for each in children))
        case FieldsOf(cls, names, children):
            return FieldsOf(cls, names, tuple(map_metas(each, func) for each in children))
        case _:
            assert_never(descriptor)
