"""What users write for a descriptor, read into one."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections import abc
from typing import Any, Union

import optree
import torch

from tsfunc import pytrees
from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.annotation import attribute_types, from_annotation
from tsfunc.types.class_names import class_name
from tsfunc.types.classes import check_interface, is_future_class, is_interface, is_rref_class
from tsfunc.types.descriptors import (
    DESCRIPTORS,
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
    children_of,
    entry_text,
    tensor_leaves,
)
from tsfunc.types.dims import Dim, DimExpr
from tsfunc.types.grammar import (
    ANY,
    TS_TYPES,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSRRef,
    TSTensor,
    TSTuple,
    TSType,
    assert_never,
    children_of_type,
)
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.values import describe

_SUPPORTED = (
    "a MetaTensorType, a class, List[X], Tuple[X, ...], Dict[K, V], Optional[X], Union[X, Y], "
    "Literal[...], Any, a type of tsfunc.types, a container of descriptors, or a value"
)


def as_descriptor(written: Any, where: str = "the descriptor") -> Descriptor:
    """What a user's descriptor stands for.

    Args:
        written: a `MetaTensorType`; a class or typing object; a container (any pytree node)
            of descriptors; or any other Python value, which then must come as it is.
        where: how error messages call it.

    Raises:
        DescriptorError: it is a typing object that no value can be checked against.

    Example:
        >>> from typing import List, Optional
        >>> print(as_descriptor({"w": List[MetaTensorType(rank=2)], "on": Optional[bool]}))
        {'w': List[tensor[?, ?]], 'on': bool | None}

    Source: ``InputDescriptor`` of the TorchScript Input Descriptor proposal.
    """
    try:
        return _descriptor(written, where)
    except RecursionError:
        raise DescriptorError(
            f"{where}: a {type(written).__name__} that contains itself, or is nested too deeply, "
            f"describes nothing; give a type such as Any for a part of it"
        ) from None


def _descriptor(written: Any, where: str) -> Descriptor:
    if isinstance(written, DESCRIPTORS):
        return written
    if isinstance(written, Dim | DimExpr):
        raise DescriptorError(
            f"{where}: {written!r} is a size in the shape of a tensor, and no descriptor; write "
            f"MetaTensorType([{written!r}]), or int for a number"
        )
    if isinstance(written, TS_TYPES):
        return _from_type(written)
    if typing.get_origin(written) is not None:
        return _from_generic(written, where)
    if written is typing.Any:
        return Anything()
    if isinstance(written, typing.NewType):
        return _descriptor(written.__supertype__, where)
    if isinstance(written, type):
        return _from_class(written, where)
    if type(written).__module__ in ("typing", "typing_extensions"):
        raise DescriptorError(f"{where}: {written!r} can't be checked at a call; give {_SUPPORTED}")
    if not optree.tree_is_leaf(written, none_is_leaf=True):
        return _from_container(written, where)
    if dataclasses.is_dataclass(written):
        return _from_record(written, where)
    known = pytrees.structure_of(written).type is not None
    return _from_container(written, where) if known else _from_value(written, where)


_TENSOR_TEXT = re.compile(r"(?:tensor|[a-z]+\d+\w*|bool)\[.*\]")


def _from_value(value: Any, where: str) -> Value:
    """A value, which a call is compared with: it has to stay what it is."""
    if isinstance(value, str) and _TENSOR_TEXT.match(value):
        raise DescriptorError(
            f"{where}: {value!r} is a string, but reads as the description of a tensor; write "
            f"MetaTensorType.parse({value!r}), or Value({value!r}) if the argument is that string"
        )
    _require_hashable(value, where)
    return Value(value)


def _require_hashable(value: Any, where: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise DescriptorError(
            f"{where}: {describe(value)} can't be hashed, so that it may change and be another "
            f"value; give a value that can (a frozenset for a set, a tuple for an array), the "
            f"class {type(value).__name__}, or Value(...) to have calls compared with it as it is"
        ) from None


def _from_type(type_: TSType, inside: tuple[type, ...] = ()) -> Descriptor:
    """`inside` are the classes around it, which are described once."""
    children = [_from_type(child, inside) for child in children_of_type(type_)]
    match type_:
        case TSMetaType():
            return Anything()
        case TSPrimitiveType("None"):
            return Value(None)
        case TSPrimitiveType(name):
            return InstanceOf(_PRIMITIVES[name])
        case TSTuple():
            return Nested(tuple, tuple(range(len(children))), tuple(children))
        case TSNamedTuple(names):
            return NamedOf(names, tuple(children))
        case TSList():
            return ListOf(*children)
        case TSDict():
            return DictOf(*children)
        case TSOptional():
            return OneOf((*children, Value(None)))
        case TSTensor(cls, meta):
            if cls is torch.Tensor:
                return meta
            return InstanceOf(cls) if meta == MetaTensorType() else TensorOf(cls, meta)
        case TSFuture() | TSRRef() | TSModuleInterface():
            return OfType(type_)
        case TSBuiltinClass(cls) | TSCustomClass(cls) | TSEnum(cls):
            return InstanceOf(cls) if cls in inside else _from_class(cls, class_name(cls), inside)
        case _:
            assert_never(type_)


_PRIMITIVES: dict[str, type] = {
    "int": int,
    "float": float,
    "double": float,
    "bool": bool,
    "str": str,
}


def _from_record(record: Any, where: str) -> Descriptor:
    """A dataclass instance: of descriptors for its fields if there are any, else a value."""
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    children = tuple(_descriptor(each, f"{where}.{name}") for name, each in values.items())
    if any(_describes(child) for child in children):
        return FieldsOf(type(record), tuple(values), children)
    return Value(record)


def _describes(descriptor: Descriptor) -> bool:
    """Whether a descriptor is more than the value that was written."""
    match descriptor:
        case Value():
            return False
        case Nested(_, _, children) | FieldsOf(_, _, children) | NamedOf(_, children):
            return any(map(_describes, children))
        case _:
            return True


def _from_class(cls: type, where: str, inside: tuple[type, ...] = ()) -> Descriptor:
    if cls in (torch.Tensor, MetaTensorType):
        return MetaTensorType()
    if cls is type(None):
        return Value(None)
    if optree.is_namedtuple_class(cls):
        children = _annotated(cls, optree.namedtuple_fields(cls), inside)
        return Nested(cls, tuple(range(len(children))), children)
    if dataclasses.is_dataclass(cls) and dataclasses.fields(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
        return FieldsOf(cls, names, _annotated(cls, names, inside))
    if is_interface(cls):
        try:
            check_interface(cls)
        except AnnotationError as error:
            raise DescriptorError(f"{where}: {error}") from None
        return OfType(TSModuleInterface(cls))
    try:
        isinstance(None, cls)
    except TypeError as error:
        raise DescriptorError(
            f"{where}: {cls.__name__} can't be checked at a call: {error}"
        ) from None
    return InstanceOf(cls)


def _annotated(
    cls: type, names: tuple[str, ...], inside: tuple[type, ...]
) -> tuple[Descriptor, ...]:
    """What the annotations of a class say of some attributes; without one, nothing."""
    types_, inside = attribute_types(cls), (*inside, cls)
    return tuple(_from_type(types_.get(name, ANY), inside) for name in names)


def _from_generic(written: object, where: str) -> Descriptor:
    """A typing object that has been given arguments, or waits for them (``List``)."""
    origin, args = typing.get_origin(written), typing.get_args(written)
    if origin is typing.Annotated:
        return _from_annotated(args, where)
    if origin is typing.Literal:
        for value in args:
            _require_hashable(value, where)
        return OneOf(tuple(Value(value) for value in args))
    if origin in (Union, types.UnionType):
        return OneOf(tuple(_descriptor(arg, where) for arg in args))
    if origin is list:
        return ListOf(_descriptor(args[0], f"{where}[...]") if args else Anything())
    if origin in (abc.Sequence, abc.MutableSequence):
        element = _descriptor(args[0], f"{where}[...]") if args else Anything()
        tuples = (TupleOf(element),) if origin is abc.Sequence else ()
        return OneOf((ListOf(element), *tuples)) if tuples else ListOf(element)
    if origin in (dict, abc.Mapping, abc.MutableMapping):
        key, item = args or (Any, Any)
        return _dict_of(_descriptor(key, where), _descriptor(item, f"{where}[...]"), where)
    if origin is tuple:
        return _from_tuple(written, args, where)
    if isinstance(origin, type) and (is_future_class(origin) or is_rref_class(origin)):
        return _from_type(from_annotation(written, where=where))
    raise DescriptorError(f"{where}: {written!r} can't be checked at a call; give {_SUPPORTED}")


def _from_annotated(args: tuple[Any, ...], where: str) -> Descriptor:
    """``Annotated[Tensor, MetaTensorType(...)]`` describes a tensor."""
    if any(isinstance(extra, MetaTensorType) for extra in args[1:]):
        return _from_type(from_annotation(typing.Annotated[args], where=where))
    return _descriptor(args[0], where)


def _dict_of(key: Descriptor, item: Descriptor, where: str) -> DictOf:
    if any(tensor_leaves(key, where)):
        raise DescriptorError(f"{where}: the keys of a dict are no tensors, got {key}")
    return DictOf(key, item)


def _from_tuple(written: object, args: tuple[Any, ...], where: str) -> Descriptor:
    if written is typing.Tuple:  # noqa: UP006
        return TupleOf(Anything())
    if len(args) == 2 and args[1] is Ellipsis:
        return TupleOf(_descriptor(args[0], f"{where}[...]"))
    if args == ((),):  # Tuple[()] on Python 3.10
        args = ()
    if Ellipsis in args:
        raise DescriptorError(
            f"{where}: {written!r} can't be checked at a call; a tuple of any length is "
            f"Tuple[X, ...]"
        )
    children = (_descriptor(arg, f"{where}[{i}]") for i, arg in enumerate(args))
    return Nested(tuple, tuple(range(len(args))), tuple(children))


def _from_container(written: object, where: str) -> Descriptor:
    entries, values = children_of(written)
    kind = type(written)
    children = tuple(
        _descriptor(value, where + entry_text(kind, entry))
        for entry, value in zip(entries, values, strict=True)
    )
    return Nested(dict if issubclass(kind, dict) else kind, entries, children)
