"""Reading of the users' descriptors, and of the annotations of parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.annotation import (
    SUPPORTED,
    attribute_types,
    from_annotation,
    from_typing,
    require_hashable,
)
from tsfunc.types.base import TSType
from tsfunc.types.classes import check_interface, class_type, is_interface
from tsfunc.types.containers import TSFields, TSNamedTuple, TSPytree, TSTuple
from tsfunc.types.dims import Dim
from tsfunc.types.grammar import Descriptor
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.single import (
    ANY,
    FLOAT,
    NONE,
    TENSOR,
    TSBuiltinClass,
    TSCustomClass,
    TSEnum,
    TSModuleInterface,
    TSPrimitiveType,
    TSTensor,
    Value,
    literal,
)
from tsfunc.types.sizes import DimExpr
from tsfunc.types.text import read_type
from tsfunc.types.unions import TSOptional, TSUnion
from tsfunc.types.values import class_name, container_children, entry_text
from tsfunc.user_code import folding


@folding()
def as_descriptor(written: Any, where: str = "the descriptor") -> Descriptor:
    """Return the descriptor that a user's object stands for.

    Args:
        written: a ``MetaTensorType``; a class or typing object; a container (any pytree node) of
            descriptors; or any other Python value, which the argument must then equal.
        where: the path of the descriptor in error messages.

    Raises:
        DescriptorError: a typing object against which values can't be checked.

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
            f"can't be a descriptor; give a type such as Any for a part of it"
        ) from None


@folding()
def parse_descriptor(text: str, scope: Mapping[str, object] | None = None) -> Descriptor:
    """Return the descriptor that a text describes; the inverse of ``str``.

    Values without a literal (a tensor, an object) can't be parsed.

    Args:
        text: a descriptor as returned by ``str``.
        scope: the objects that the names of classes in the text refer to, see ``parse``.

    Raises:
        AnnotationError: the text is not a descriptor.

    Example:
        >>> text = "{'w': List[f32[n, 64]], 'mode': Literal['sum'] | None}"
        >>> str(parse_descriptor(text)) == text
        True
    """
    return read_type(
        text, scope or {}, lambda value: from_annotation(value, scope), _named_descriptor
    )


def _named_descriptor(value: Any) -> Descriptor:
    """Return the descriptor of an object named in a text, without fields: the text lists them."""
    is_class = isinstance(value, type) and not is_interface(value)
    return class_type(value) if is_class else as_descriptor(value)


def _descriptor(written: Any, where: str) -> Descriptor:
    if isinstance(written, TSType):
        return _from_type(written)
    if isinstance(written, MetaTensorType):
        return TSTensor(meta=written)
    if isinstance(written, Dim | DimExpr):
        raise DescriptorError(
            f"{where}: {written!r} is a size in the shape of a tensor, not a descriptor; write "
            f"MetaTensorType([{written!r}]), or int for a number"
        )
    if typing.get_origin(written) is not None:
        return from_typing(written, where, _descriptor)
    if written is typing.Any:
        return ANY
    if isinstance(written, typing.NewType):
        return _descriptor(written.__supertype__, where)
    if isinstance(written, type):
        return _from_class(written, where)
    if type(written).__module__ in ("typing", "typing_extensions"):
        raise DescriptorError(f"{where}: {written!r} can't be checked at a call; give {SUPPORTED}")
    if not optree.tree_is_leaf(written, none_is_leaf=True):
        return _from_container(written, where)
    if dataclasses.is_dataclass(written):
        return _from_record(written, where)
    is_container = pytrees.structure_of(written).type is not None
    return _from_container(written, where) if is_container else _from_value(written, where)


_TENSOR_TEXT = re.compile(r"(?:tensor|[a-z]+\d+\w*|bool)\[.*\]")


def _from_value(value: Any, where: str) -> Descriptor:
    """Return the type of a literal, which must be hashable, so that it does not change."""
    if isinstance(value, str) and _TENSOR_TEXT.match(value):
        raise DescriptorError(
            f"{where}: {value!r} is a string, but reads as the description of a tensor; write "
            f"MetaTensorType.parse({value!r}), or Value({value!r}) if the argument is that string"
        )
    require_hashable(value, where)
    return literal(value)


def _from_type(type_: TSType, inside: tuple[type, ...] = ()) -> Descriptor:
    """Return a type as a descriptor.

    ``inside`` are the enclosing classes, which are not expanded again.
    """
    match type_:
        case TSPrimitiveType("double"):
            return FLOAT
        case Value(None):
            return NONE
        case TSOptional(element):
            return TSUnion((_from_type(element, inside), NONE))
        case _ if type_.language_only:
            return type_
        case TSCustomClass(cls) | TSEnum(cls) | TSBuiltinClass(cls):
            if cls in inside:
                return class_type(cls)
            expanded = _from_class(cls, class_name(cls), inside)
            return type_ if expanded == type_ else expanded
        case _:
            return type_.with_parts([_from_type(part, inside) for part in type_.parts])


def _from_record(record: Any, where: str) -> Descriptor:
    """Convert a dataclass instance: to its fields' descriptors if it has any, else to a value."""
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    children = tuple(_descriptor(value, f"{where}.{name}") for name, value in values.items())
    if any(_describes(child) for child in children):
        return TSFields(type(record), tuple(values), children)
    return Value(record)


def _describes(descriptor: Descriptor) -> bool:
    """True if a descriptor contains more than literal values."""
    if isinstance(descriptor, TSPytree | TSTuple | TSNamedTuple | TSFields):
        return any(map(_describes, descriptor.parts))
    return descriptor != NONE and not isinstance(descriptor, Value)


def _from_class(cls: type, where: str, inside: tuple[type, ...] = ()) -> Descriptor:
    if cls is MetaTensorType:
        return TENSOR
    if optree.is_namedtuple_class(cls):
        children = _annotated_types(cls, optree.namedtuple_fields(cls), inside)
        return TSPytree(cls, tuple(range(len(children))), children)
    if dataclasses.is_dataclass(cls) and dataclasses.fields(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
        return TSFields(cls, names, _annotated_types(cls, names, inside))
    if is_interface(cls):
        try:
            check_interface(cls)
        except AnnotationError as error:
            raise DescriptorError(f"{where}: {error}") from None
        return TSModuleInterface(cls)
    try:
        isinstance(None, cls)
    except TypeError as error:
        raise DescriptorError(
            f"{where}: {cls.__name__} can't be checked at a call: {error}"
        ) from None
    return class_type(cls)


def _annotated_types(
    cls: type, names: tuple[str, ...], inside: tuple[type, ...]
) -> tuple[Descriptor, ...]:
    """Return the types of some attributes of a class; ``Any`` for one without annotation."""
    types_, inside = attribute_types(cls), (*inside, cls)
    return tuple(_from_type(types_.get(name, ANY), inside) for name in names)


def _from_container(written: object, where: str) -> Descriptor:
    entries, values = container_children(written)
    kind = type(written)
    children = tuple(
        _descriptor(value, where + entry_text(kind, entry))
        for entry, value in zip(entries, values, strict=True)
    )
    if kind is tuple:
        return TSTuple(children)
    return TSPytree(dict if issubclass(kind, dict) else kind, entries, children)


# --- the parameters of a function


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or module; a function in C accepts any arguments."""
    try:
        return inspect.signature(func.forward if isinstance(func, torch.nn.Module) else func)
    except ValueError:
        return inspect.signature(_takes_anything)


def _takes_anything(*args: Any, **kwargs: Any) -> None: ...
