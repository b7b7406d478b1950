"""Descriptors: what a parameter may be, in the form that is worked with.

What a user writes is read (`reading.py`) into ``Descriptor``, a union of frozen dataclasses that
every later stage matches exhaustively::

    MetaTensorType(...)          a tensor with these attributes
    TensorOf(cls, ...)           the same, of a class derived from Tensor
    Anything()                   no promise
    InstanceOf(cls)              an instance of a class
    OfType(type)                 a value of a type that has no children: a future, an interface
    Value(value)                 this value
    ListOf(X), TupleOf(X)        any number of X
    DictOf(K, V)                 any number of items
    OneOf((X, Y))                either
    Nested(kind, entries, ...)   a container with exactly these children
    NamedOf(names, ...)          a named tuple of any class
    FieldsOf(cls, names, ...)    an object with these attributes
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch

from tsfunc import pytrees
from tsfunc.types.class_names import class_name
from tsfunc.types.grammar import TSFuture, TSModuleInterface, TSRRef, TSTensor, assert_never
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
        return class_name(self.cls)


@dataclass(frozen=True)
class TensorOf:
    """A tensor of a derived class: ``Annotated[Parameter, MetaTensorType(...)]``."""

    cls: type[torch.Tensor]
    meta: MetaTensorType

    def __str__(self) -> str:
        return str(TSTensor(self.cls, self.meta))


@dataclass(frozen=True)
class OfType:
    """A value of a type."""

    type: TSFuture | TSRRef | TSModuleInterface

    def __str__(self) -> str:
        return str(self.type)


@dataclass(frozen=True, eq=False)
class Value:
    """One value, even where it would be read as something else (a class, a container).

    Args:
        value: what the argument must be; see `same_value`.

    Example:
        >>> from tsfunc.types import as_descriptor
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
        text = literal_text(self.value)
        return f"Value({describe(self.value)})" if text is None else text


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


@dataclass(frozen=True, eq=False)
class Nested:
    """A container with exactly these children; `entries` are optree's names for them."""

    kind: type
    entries: tuple[Any, ...]
    children: tuple[Descriptor, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Nested)
            and self.kind is other.kind
            and same_value(self.entries, other.entries)
            and self.children == other.children
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.entries, self.children))

    def __str__(self) -> str:
        if self.kind is list:
            return f"[{', '.join(map(str, self.children))}]"
        if self.kind is tuple:
            return f"Tuple[{', '.join(map(str, self.children)) or '()'}]"
        if self.kind is dict:
            return f"{{{self._items(key_text)}}}"
        return f"{class_name(self.kind)}({self._items(lambda entry: field_text(self.kind, entry))})"

    def _items(self, name: Callable[[Any], str]) -> str:
        pairs = zip(self.entries, self.children, strict=True)
        return ", ".join(f"{name(entry)}: {child}" for entry, child in pairs)


@dataclass(frozen=True)
class NamedOf:
    """A named tuple of any class that has elements of these names."""

    names: tuple[str, ...]
    children: tuple[Descriptor, ...]

    def __str__(self) -> str:
        pairs = zip(self.names, self.children, strict=True)
        return f"namedtuple({', '.join(f'{name}: {child}' for name, child in pairs)})"


@dataclass(frozen=True)
class FieldsOf:
    """An instance of a class, and what some of its attributes are."""

    cls: type
    names: tuple[str, ...]
    children: tuple[Descriptor, ...]

    def __str__(self) -> str:
        pairs = zip(self.names, self.children, strict=True)
        items = ", ".join(f".{name}: {child}" for name, child in pairs)
        return f"{class_name(self.cls)}({items})"


@dataclass(frozen=True)
class Attribute:
    """The entry of a path that leads to an attribute of an object."""

    name: str

    def __str__(self) -> str:
        return self.name


Descriptor: TypeAlias = (
    MetaTensorType
    | TensorOf
    | Anything
    | InstanceOf
    | OfType
    | Value
    | ListOf
    | TupleOf
    | DictOf
    | OneOf
    | Nested
    | NamedOf
    | FieldsOf
)

DESCRIPTORS = (
    MetaTensorType, TensorOf, Anything, InstanceOf, OfType, Value, ListOf, TupleOf, DictOf, OneOf,
    Nested, NamedOf, FieldsOf,
)  # fmt: skip


def children_of(container: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The entries and children of a pytree node, dicts in their own order."""
    if isinstance(container, dict):
        return tuple(container), tuple(container.values())
    pytrees.flatten(container)  # takes in classes that are unknown so far
    flat = optree.tree_flatten_one_level(container, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    return tuple(flat.entries), tuple(flat.children)


def entry_text(kind: type, entry: object) -> str:
    """How a child is reached: ``.field`` in a named tuple, ``['key']`` or ``[0]`` elsewhere."""
    if isinstance(entry, Attribute):
        return f".{entry.name}"
    field = _field(kind, entry)
    return f"[{entry!r}]" if field is None else f".{field}"


def field_text(kind: type, entry: object) -> str:
    """How a child is named in the text of a descriptor."""
    return _field(kind, entry) or key_text(entry)


def _field(kind: type, entry: object) -> str | None:
    if isinstance(entry, str) and dataclasses.is_dataclass(kind):
        return entry
    if isinstance(entry, int) and optree.is_namedtuple_class(kind):
        return str(optree.namedtuple_fields(kind)[entry])
    if isinstance(entry, int) and optree.is_structseq_class(kind):
        return str(optree.structseq_fields(kind)[entry])
    return None


def key_text(key: object) -> str:
    """The key of a dict as text; one that has none is described, and can't be read back."""
    text = literal_text(key)
    return describe(key) if text is None else text.removeprefix("Literal[").removesuffix("]")


_LITERALS = (int, bool, float, complex, str, bytes)


def literal_text(value: object) -> str | None:
    """A value as text that reads back; None if there is none."""
    if value is None:
        return "None"
    if type(value) in _LITERALS or (
        type(value) is tuple and value and all(type(each) in _LITERALS for each in value)
    ):
        return f"Literal[{value!r}]"
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return f"Literal[{class_name(type(value))}.{value.name}]"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return f"Literal[{value}]"
    return None


def tensor_leaves(descriptor: Descriptor, where: str) -> Iterator[tuple[str, MetaTensorType]]:
    """Every `MetaTensorType` inside a descriptor, with the path of what it describes."""
    match descriptor:
        case MetaTensorType():
            yield where, descriptor
        case TensorOf(_, meta):
            yield where, meta
        case Anything() | InstanceOf() | OfType() | Value():
            return
        case ListOf(element) | TupleOf(element) | DictOf(item=element):
            yield from tensor_leaves(element, f"{where}[...]")
        case OneOf(alternatives):
            for alternative in alternatives:
                yield from tensor_leaves(alternative, where)
        case Nested(kind, entries, children):
            for entry, child in zip(entries, children, strict=True):
                yield from tensor_leaves(child, where + entry_text(kind, entry))
        case NamedOf(names, children) | FieldsOf(_, names, children):
            for name, child in zip(names, children, strict=True):
                yield from tensor_leaves(child, f"{where}.{name}")
        case _:
            assert_never(descriptor)


def governing(descriptor: Descriptor, path: tuple[Any, ...]) -> set[MetaTensorType | None]:
    """What may govern a tensor at `path` inside a descriptor; None among it: nothing may."""
    match descriptor:
        case MetaTensorType() | TensorOf(meta=MetaTensorType()):
            meta = descriptor if isinstance(descriptor, MetaTensorType) else descriptor.meta
            return set() if path else {meta}
        case Anything():
            return {None}
        case InstanceOf(cls):
            is_tensor = issubclass(cls, torch.Tensor) or issubclass(torch.Tensor, cls)
            return {None} if path or is_tensor else set()
        case Value(value):
            return {None} if path or isinstance(value, torch.Tensor) else set()
        case OfType():
            return {None} if path else set()
        case ListOf(element) | TupleOf(element) | DictOf(item=element):
            return governing(element, path[1:]) if path else set()
        case OneOf(alternatives):
            return {meta for each in alternatives for meta in governing(each, path)}
        case Nested(_, entries, children):
            return _governing_child(entries, children, path)
        case NamedOf(names, children):
            return _governing_child(tuple(range(len(names))), children, path)
        case FieldsOf(_, names, children):
            return _governing_child(names, children, (*map(str, path[:1]), *path[1:]))
        case _:
            assert_never(descriptor)


def _governing_child(
    entries: tuple[Any, ...], children: tuple[Descriptor, ...], path: tuple[Any, ...]
) -> set[MetaTensorType | None]:
    if not path or path[0] not in entries:
        return set()
    return governing(children[entries.index(path[0])], path[1:])
