"""Queries on descriptors: the class of the values, their tensors, their parts.

A descriptor is a type (see ``grammar``), one for each parameter of a call.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import optree
import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.classes import names_of_class, nominal_type, primitive_of
from tsfunc.types.dims import DimForm
from tsfunc.types.grammar import (
    BOOL,
    FLOAT,
    INT,
    NONE,
    STR,
    Descriptor,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFields,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSPytree,
    TSRRef,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSUnion,
    Value,
    assert_never,
    children_of_type,
)
from tsfunc.types.meta import MetaTensorType

PYTHON_CLASSES: dict[str, type] = {
    "int": int,
    "float": float,
    "double": float,
    "bool": bool,
    "str": str,
    "None": type(None),
}
"""The classes of the values of primitive types."""

SINGLE = (int, float, str)


def class_type(cls: type) -> Descriptor:
    """Return the type of the instances of a class, without their attributes."""
    primitive = {int: INT, float: FLOAT, bool: BOOL, str: STR, type(None): NONE}.get(cls)
    if primitive is not None:
        return primitive
    has_fields = dataclasses.is_dataclass(cls) and bool(dataclasses.fields(cls))
    if has_fields or optree.is_namedtuple_class(cls):
        return TSFields(cls, (), ())
    try:
        return nominal_type(cls)
    except AnnotationError:  # an enum that breaks the rules: its members are plain objects
        return TSCustomClass(cls)


def meta_of(descriptor: Descriptor) -> MetaTensorType | None:
    """Return the metadata of a descriptor of a tensor; None for other descriptors."""
    if isinstance(descriptor, TSTensor):
        return descriptor.meta
    if isinstance(descriptor, Value) and isinstance(descriptor.value, torch.Tensor):
        return MetaTensorType.of(descriptor.value)
    return None


def class_of(descriptor: Descriptor) -> type | None:
    """Return the class of all values that fit a descriptor; None if there is no single class."""
    match descriptor:
        case TSTensor(cls) | TSFields(cls) | TSPytree(kind=cls):
            return cls
        case TSBuiltinClass(cls) | TSCustomClass(cls) | TSEnum(cls):
            return cls
        case Value(value):
            return type(value)
        case TSPrimitiveType(name):
            return PYTHON_CLASSES[name]
        case TSList():
            return list
        case TSTuple() | TSNamedTuple() | TSTupleOf():
            return tuple
        case TSDict():
            return dict
        case (
            TSMetaType() | TSOptional() | TSUnion() | TSFuture() | TSRRef() | TSModuleInterface()
        ):  # fmt: skip
            return None
        case _:
            assert_never(descriptor)


def fits_class(descriptor: Descriptor, cls: type) -> bool:
    """True if each value that fits a descriptor is an instance of a class.

    In the language neither a bool nor the member of an enum is an int.
    """
    own = class_of(descriptor)
    if own is None or not issubclass(own, cls):
        return False
    if cls not in SINGLE or own is cls:
        return True
    primitive = primitive_of(descriptor.value) if isinstance(descriptor, Value) else None
    return str(primitive) == cls.__name__


def elements_of(descriptor: Descriptor, kind: type) -> Sequence[Descriptor] | None:
    """Return the types of the elements of a list or tuple; None for other descriptors."""
    match descriptor:
        case TSList(element) if kind is list:
            return (element,)
        case TSTupleOf(element) if kind is tuple:
            return (element,)
        case TSTuple(elements) | TSNamedTuple(elements=elements) if kind is tuple:
            return elements
        case TSPytree(own, _, children) if issubclass(own, kind):
            return children
        case _:
            return None


def entries_of(descriptor: Descriptor, kind: type) -> Sequence[Any]:
    """Return the entries of a container of a kind; nothing if it can have any entries."""
    if isinstance(descriptor, TSTuple) and issubclass(tuple, kind):
        return range(len(descriptor.elements))
    fits = isinstance(descriptor, TSPytree) and issubclass(descriptor.kind, kind)
    return descriptor.entries if isinstance(descriptor, TSPytree) and fits else ()


def names_of(descriptor: Descriptor) -> tuple[str, ...] | None:
    """Return the names of a named tuple's elements; None if it is not one."""
    if isinstance(descriptor, TSNamedTuple):
        return descriptor.names
    return names_of_class(descriptor.kind) if isinstance(descriptor, TSPytree) else None


def dims_in(descriptor: Descriptor) -> list[DimForm]:
    """Return all sizes in a descriptor."""
    if isinstance(descriptor, TSTensor):
        return list(descriptor.meta.sizes)
    return [dim for child in children_of_type(descriptor) for dim in dims_in(child)]


def keys_of(descriptor: Descriptor) -> list[Descriptor]:
    """Return the types of the keys of a dict."""
    if isinstance(descriptor, TSDict):
        return [descriptor.key]
    return [literal(entry) for entry in entries_of(descriptor, dict)]


def items_of(descriptor: Descriptor) -> list[Descriptor]:
    """Return the types of the values of a dict."""
    if isinstance(descriptor, TSDict):
        return [descriptor.value]
    return list(descriptor.children) if isinstance(descriptor, TSPytree) else []


def literal(value: object) -> Descriptor:
    """Return the type of one value; the type of None is NONE."""
    return NONE if value is None else Value(value)


def is_plain_value(value: object) -> bool:
    """True for a value without tensors or parts: a number, a string, an enum."""
    return isinstance(value, _PLAIN)


_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, enum.Enum,
)  # fmt: skip


def child_at(
    descriptor: TSPytree | TSTuple | TSNamedTuple | TSFields, path: tuple[Any, ...]
) -> Descriptor | None:
    """Return the child at the first entry of a path; None if there is none."""
    if isinstance(descriptor, TSFields):
        entries: Sequence[Any] = descriptor.names
        path = tuple(map(str, path[:1]))
    elif isinstance(descriptor, TSPytree):
        entries = descriptor.entries
    else:
        entries = range(len(descriptor.elements))
    if not path or path[0] not in entries:
        return None
    return children_of_type(descriptor)[entries.index(path[0])]
