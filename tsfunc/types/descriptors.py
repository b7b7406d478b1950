"""Descriptors: what a parameter may be, as users write it and as it is worked with.

`as_descriptor` reads what a user writes into ``Descriptor``, a union of frozen dataclasses that
every later stage matches exhaustively::

    MetaTensorType(...)          a tensor with these attributes
    Anything()                   no promise
    InstanceOf(cls)              an instance of a class
    Value(value)                 this value
    ListOf(X), TupleOf(X)        any number of X
    DictOf(K, V)                 any number of items
    OneOf((X, Y))                either
    Nested(kind, entries, ...)   a container with exactly these children
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import optree
import torch

from tsfunc.errors import DescriptorError
from tsfunc.types.grammar import assert_never
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.values import describe, same_value


@dataclass(frozen=True)
class Anything:
    """No promise: ``typing.Any``."""

    def __str__(self) -> str:
        return "Any"


@dataclass(frozen=True)
class InstanceOf:
    """An instance of a class; a bool is no int."""

    cls: type

    def __str__(self) -> str:
        return self.cls.__name__


@dataclass(frozen=True, eq=False)
class Value:
    """One value, even where it would be read as something else (a class, a container).

    Args:
        value: what the argument must be; see `same_value`.

    Example:
        >>> as_descriptor(int), as_descriptor(Value(int)), as_descriptor(3)
        (InstanceOf(cls=<class 'int'>), Value(value=<class 'int'>), Value(value=3))

    Source: value specialization of the TorchScript Input Descriptor proposal.
    """

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash((Value, type(self.value)))  # the value itself need not be hashable

    def __str__(self) -> str:
        return describe(self.value)


@dataclass(frozen=True)
class ListOf:
    """A list of any length."""

    element: Descriptor

    def __str__(self) -> str:
        return f"List[{self.element}]"


@dataclass(frozen=True)
class TupleOf:
    """A tuple of any length: ``Tuple[X, ...]``."""

    element: Descriptor

    def __str__(self) -> str:
        return f"Tuple[{self.element}, ...]"


@dataclass(frozen=True)
class DictOf:
    """A dict of any length."""

    key: Descriptor
    item: Descriptor

    def __str__(self) -> str:
        return f"Dict[{self.key}, {self.item}]"


@dataclass(frozen=True)
class OneOf:
    """The first of some descriptors that fits."""

    alternatives: tuple[Descriptor, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.alternatives))


@dataclass(frozen=True)
class Nested:
    """A container with exactly these children; `entries` are optree's names for them."""

    kind: type
    entries: tuple[Any, ...]
    children: tuple[Descriptor, ...]

    def __str__(self) -> str:
        parts = (
            f"{entry_text(self.kind, entry)}: {child}"
            for entry, child in zip(self.entries, self.children, strict=True)
        )
        return f"{self.kind.__name__}({', '.join(parts)})"


Descriptor: TypeAlias = (
    MetaTensorType | Anything | InstanceOf | Value | ListOf | TupleOf | DictOf | OneOf | Nested
)

_NODES = (MetaTensorType, Anything, InstanceOf, Value, ListOf, TupleOf, DictOf, OneOf, Nested)

_SUPPORTED = (
    "a MetaTensorType, a class, List[X], Tuple[X, ...], Dict[K, V], Optional[X], Union[X, Y], "
    "Literal[...], Any, a container of descriptors, or a value"
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
        dict(['w']: List[tensor[?, ?]], ['on']: bool | None)

    Source: ``InputDescriptor`` of the TorchScript Input Descriptor proposal.
    """
    if isinstance(written, _NODES):
        return written
    if typing.get_origin(written) is not None:
        return _from_generic(written, where)
    if written is typing.Any:
        return Anything()
    if isinstance(written, type):
        return _from_class(written, where)
    if type(written).__module__ in ("typing", "typing_extensions"):
        raise DescriptorError(f"{where}: {written!r} can't be checked at a call; give {_SUPPORTED}")
    if not optree.tree_is_leaf(written, none_is_leaf=True):
        return _from_container(written, where)
    return Value(written)


def _from_class(cls: type, where: str) -> Descriptor:
    if cls in (torch.Tensor, MetaTensorType):
        return MetaTensorType()
    if cls is type(None):
        return Value(None)
    try:
        isinstance(None, cls)
    except TypeError as error:
        raise DescriptorError(
            f"{where}: {cls.__name__} can't be checked at a call: {error}"
        ) from None
    return InstanceOf(cls)


def _from_generic(written: object, where: str) -> Descriptor:
    """A typing object that has been given arguments, or waits for them (``List``)."""
    origin, args = typing.get_origin(written), typing.get_args(written)
    if origin is typing.Annotated:
        return as_descriptor(args[0], where)
    if origin is typing.Literal:
        return OneOf(tuple(Value(value) for value in args))
    if origin in (Union, types.UnionType):
        return OneOf(tuple(as_descriptor(arg, where) for arg in args))
    if origin is list:
        return ListOf(as_descriptor(args[0], f"{where}[...]") if args else Anything())
    if origin is dict:
        key, item = args or (Any, Any)
        return _dict_of(as_descriptor(key, where), as_descriptor(item, f"{where}[...]"), where)
    if origin is tuple:
        return _from_tuple(written, args, where)
    raise DescriptorError(f"{where}: {written!r} can't be checked at a call; give {_SUPPORTED}")


def _dict_of(key: Descriptor, item: Descriptor, where: str) -> DictOf:
    if any(tensor_leaves(key, where)):
        raise DescriptorError(f"{where}: the keys of a dict are no tensors, got {key}")
    return DictOf(key, item)


def _from_tuple(written: object, args: tuple[Any, ...], where: str) -> Descriptor:
    if written is typing.Tuple:  # noqa: UP006
        return TupleOf(Anything())
    if len(args) == 2 and args[1] is Ellipsis:
        return TupleOf(as_descriptor(args[0], f"{where}[...]"))
    if args == ((),):  # Tuple[()] on Python 3.10
        args = ()
    children = (as_descriptor(arg, f"{where}[{i}]") for i, arg in enumerate(args))
    return Nested(tuple, tuple(range(len(args))), tuple(children))


def _from_container(written: object, where: str) -> Descriptor:
    entries, values = children_of(written)
    kind = type(written)
    children = tuple(
        as_descriptor(value, where + entry_text(kind, entry))
        for entry, value in zip(entries, values, strict=True)
    )
    return Nested(dict if issubclass(kind, dict) else kind, entries, children)


def children_of(container: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The entries and children of a pytree node, dicts in their own order."""
    if isinstance(container, dict):
        return tuple(container), tuple(container.values())
    flat = optree.tree_flatten_one_level(container, none_is_leaf=True)
    return tuple(flat.entries), tuple(flat.children)


def entry_text(kind: type, entry: object) -> str:
    """How a child is reached: ``.field`` in a named tuple, ``['key']`` or ``[0]`` elsewhere."""
    if isinstance(entry, int) and optree.is_namedtuple_class(kind):
        return f".{optree.namedtuple_fields(kind)[entry]}"
    if isinstance(entry, int) and optree.is_structseq_class(kind):
        return f".{optree.structseq_fields(kind)[entry]}"
    return f"[{entry!r}]"


def tensor_leaves(descriptor: Descriptor, where: str) -> Iterator[tuple[str, MetaTensorType]]:
    """Every `MetaTensorType` inside a descriptor, with the path of what it describes."""
    match descriptor:
        case MetaTensorType():
            yield where, descriptor
        case Anything() | InstanceOf() | Value():
            return
        case ListOf(element) | TupleOf(element) | DictOf(item=element):
            yield from tensor_leaves(element, f"{where}[...]")
        case OneOf(alternatives):
            for alternative in alternatives:
                yield from tensor_leaves(alternative, where)
        case Nested(kind, entries, children):
            for entry, child in zip(entries, children, strict=True):
                yield from tensor_leaves(child, where + entry_text(kind, entry))
        case _:
            assert_never(descriptor)


def governing(descriptor: Descriptor, path: tuple[Any, ...]) -> set[MetaTensorType | None]:
    """What may govern a tensor at `path` inside a descriptor; None among it: nothing may."""
    match descriptor:
        case MetaTensorType():
            return set() if path else {descriptor}
        case Anything():
            return {None}
        case InstanceOf(cls):
            is_tensor = issubclass(cls, torch.Tensor) or issubclass(torch.Tensor, cls)
            return {None} if path or is_tensor else set()
        case Value(value):
            return {None} if path or isinstance(value, torch.Tensor) else set()
        case ListOf(element) | TupleOf(element) | DictOf(item=element):
            return governing(element, path[1:]) if path else set()
        case OneOf(alternatives):
            return {meta for each in alternatives for meta in governing(each, path)}
        case Nested(_, entries, children):
            if not path or path[0] not in entries:
                return set()
            return governing(children[entries.index(path[0])], path[1:])
        case _:
            assert_never(descriptor)
