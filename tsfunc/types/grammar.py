"""The types of the language, as frozen dataclasses under one union.

The grammar is that of the TorchScript type system proposal, with one class for each of its rules,
and additional types for descriptors of a call::

    TSAllType        = TSType | TSInstanceClass
    TSType           = TSMetaType | TSPrimitiveType | TSStructuralType | TSNominalType | TSCallType
    TSStructuralType = TSTuple | TSNamedTuple | TSList | TSDict | TSOptional | TSFuture | TSRRef
    TSNominalType    = TSBuiltinClass | TSTensor | TSCustomClass | TSEnum | TSModuleInterface
    TSCallType       = Value | TSUnion | TSTupleOf | TSPytree | TSFields
    TSInstanceClass  = TSModuleType

A descriptor is a type in the form that `as_descriptor` returns: it has a `TSUnion` in place of
``Optional``, and dataclasses and named tuples are expanded to their fields.

Functions over types match on the union and end in ``assert_never``, so that the type checker
reports a member that a function does not handle.

NOTE [normal forms]
Two types that are subtypes of each other are equal, so that types can be compared, hashed and
printed. ``Optional`` therefore does not contain ``None``, ``Any`` or another ``Optional``:
`optional` returns the normal form of such a spelling, and the constructor rejects it. Names of
sizes are an exception: ``f32[n]`` and ``f32[m]`` alone are equivalent.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import torch

from tsfunc.errors import AnnotationError
from tsfunc.tracebacks import folded_class, folding
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.values import class_name, describe, field_text, key_text, literal_text, same_value


@dataclass(frozen=True)
class TSMetaType:
    """``Any``: every value. It is allowed in a signature, but nothing can be computed with it."""

    name: Literal["Any"] = "Any"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TSPrimitiveType:
    """A named type of single values; a ``bool`` is not an ``int``."""

    name: Literal["int", "float", "double", "bool", "str", "None"]

    def __str__(self) -> str:
        return self.name


@folded_class
@dataclass(frozen=True)
class TSTuple:
    """``Tuple[X, Y]``: a tuple with exactly these elements."""

    elements: tuple[TSType, ...]

    def __post_init__(self) -> None:
        _require_types(self, self.elements)

    def __str__(self) -> str:
        return f"Tuple[{', '.join(map(str, self.elements)) or '()'}]"


@folded_class
@dataclass(frozen=True)
class TSNamedTuple:
    """``namedtuple(a: X, b: Y)``: like `TSTuple`, with a name for each element.

    It is structural: the class of a named tuple does not matter.
    """

    names: tuple[str, ...]
    elements: tuple[TSType, ...]

    def __post_init__(self) -> None:
        _require_types(self, self.elements)
        if len(self.names) != len(self.elements) or len(set(self.names)) != len(self.names):
            raise AnnotationError(
                f"TSNamedTuple: expected a different name for each element, got names "
                f"{list(self.names)} for {len(self.elements)} element(s)"
            )

    def __str__(self) -> str:
        pairs = zip(self.names, self.elements, strict=True)
        return f"namedtuple({', '.join(f'{name}: {element}' for name, element in pairs)})"


@folded_class
@dataclass(frozen=True)
class TSList:
    """``List[X]``: a list of any length."""

    element: TSType

    def __post_init__(self) -> None:
        _require_types(self, (self.element,))

    def __str__(self) -> str:
        return f"List[{self.element}]"


@folded_class
@dataclass(frozen=True)
class TSDict:
    """``Dict[K, V]``: a dict of any size; K is str, int, float, bool, Tensor or Any."""

    key: TSType
    value: TSType

    def __post_init__(self) -> None:
        _require_types(self, (self.key, self.value))
        if not may_be_key(self.key):
            raise key_error(self.key, self.value)

    def __str__(self) -> str:
        return f"Dict[{self.key}, {self.value}]"


@folded_class
@dataclass(frozen=True)
class TSOptional:
    """``Optional[X]``: X or None. See NOTE [normal forms]; `optional` accepts any type."""

    element: TSType

    def __post_init__(self) -> None:
        _require_types(self, (self.element,))
        if _holds_none(self.element):
            raise AnnotationError(
                f"Optional[{self.element}] is {self.element}: write that, or call "
                f"tsfunc.types.optional, which finds the shortest form"
            )

    def __str__(self) -> str:
        return f"Optional[{self.element}]"


@folded_class
@dataclass(frozen=True)
class TSFuture:
    """``Future[X]``: a value that is still being computed."""

    element: TSType

    def __post_init__(self) -> None:
        _require_types(self, (self.element,))

    def __str__(self) -> str:
        return f"Future[{self.element}]"


@folded_class
@dataclass(frozen=True)
class TSRRef:
    """``RRef[X]``: a value that another process holds."""

    element: TSType

    def __post_init__(self) -> None:
        _require_types(self, (self.element,))

    def __str__(self) -> str:
        return f"RRef[{self.element}]"


@dataclass(frozen=True)
class TSTensor:
    """``Tensor`` or a class derived from it; `meta` has the known metadata."""

    cls: type[torch.Tensor] = torch.Tensor
    meta: MetaTensorType = MetaTensorType()  # noqa: RUF009  frozen

    def __str__(self) -> str:
        known = self.meta != MetaTensorType()
        if self.cls is torch.Tensor:
            return str(self.meta) if known else "Tensor"
        name = class_name(self.cls)
        return f"Annotated[{name}, {self.meta}]" if known else name


@dataclass(frozen=True)
class TSBuiltinClass:
    """A class of torch that is part of the language: ``torch.device``, ``torch.dtype``."""

    cls: type

    def __str__(self) -> str:
        return class_name(self.cls)


@dataclass(frozen=True)
class TSCustomClass:
    """Any other class. Its attributes are checked at their use (see `attribute_type`)."""

    cls: type

    def __str__(self) -> str:
        return class_name(self.cls)


@dataclass(frozen=True)
class TSEnum:
    """An enum whose members are all ints, all floats or all strs."""

    cls: type[enum.Enum]

    def __str__(self) -> str:
        return class_name(self.cls)


@dataclass(frozen=True)
class TSModuleInterface:
    """A class that consists of abstract methods with annotated arguments."""

    cls: type

    def __str__(self) -> str:
        return class_name(self.cls)


@dataclass(frozen=True, eq=False)
class Value:
    """A single value, also one that would otherwise be a descriptor (a class, a container).

    Args:
        value: the value that the argument must equal; see `same_value`.

    Two are equal if their values are equal, including types: 1, 1.0 and True differ. Tensors are
    equal if their metadata and elements are equal, and neither requires grad.

    Example:
        >>> from tsfunc.types import as_descriptor
        >>> as_descriptor(int), as_descriptor(Value(int)), as_descriptor(3)
        (TSPrimitiveType(name='int'), Value(value=<class 'int'>), Value(value=3))

    Source: value specialization of the TorchScript Input Descriptor proposal.
    """

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash((Value, type(self.value)))  # the value can be unhashable

    def __str__(self) -> str:
        text = literal_text(self.value)
        return f"Value({describe(self.value)})" if text is None else text


@folded_class
@dataclass(frozen=True)
class TSUnion:
    """``X | Y``: the first of several types that fits."""

    alternatives: tuple[TSType, ...]

    def __post_init__(self) -> None:
        _require_types(self, self.alternatives)

    def __str__(self) -> str:
        return " | ".join(map(str, self.alternatives))


@folded_class
@dataclass(frozen=True)
class TSTupleOf:
    """``Tuple[X, ...]``: a tuple of any length."""

    element: TSType

    def __post_init__(self) -> None:
        _require_types(self, (self.element,))

    def __str__(self) -> str:
        return f"Tuple[{self.element}, ...]"


@folded_class
@dataclass(frozen=True, eq=False)
class TSPytree:
    """A container with exactly these children; a tuple is a `TSTuple` instead.

    Args:
        kind: ``list``, ``dict``, or another container class of optree.
        entries: optree's names for the children.
        children: their types.
    """

    kind: type
    entries: tuple[Any, ...]
    children: tuple[TSType, ...]

    def __post_init__(self) -> None:
        _require_types(self, self.children)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TSPytree) or self.kind is not other.kind:
            return False
        if self.kind is dict and not same_value(self.entries, other.entries):
            return self._same_items(other)
        return same_value(self.entries, other.entries) and self.children == other.children

    def _same_items(self, other: TSPytree) -> bool:
        """True if both have the same keys, in any order, with the same types."""
        pairs = zip(other.entries, other.children, strict=True)
        theirs = {entry: (entry, child) for entry, child in pairs}
        return len(self.entries) == len(other.entries) and all(
            entry in theirs and same_value(entry, theirs[entry][0]) and child == theirs[entry][1]
            for entry, child in zip(self.entries, self.children, strict=True)
        )

    def __hash__(self) -> int:
        if self.kind is dict:
            return hash((dict, frozenset(zip(self.entries, self.children, strict=True))))
        return hash((self.kind, self.entries, self.children))

    def __str__(self) -> str:
        if self.kind is list:
            return f"[{', '.join(map(str, self.children))}]"
        if self.kind is dict:
            return f"{{{self._items(key_text)}}}"
        return f"{class_name(self.kind)}({self._items(lambda entry: field_text(self.kind, entry))})"

    def _items(self, name: Callable[[Any], str]) -> str:
        pairs = zip(self.entries, self.children, strict=True)
        return ", ".join(f"{name(entry)}: {child}" for entry, child in pairs)


@folded_class
@dataclass(frozen=True)
class TSFields:
    """An instance of a class, with the types of some of its attributes, or of none."""

    cls: type
    names: tuple[str, ...]
    children: tuple[TSType, ...]

    def __post_init__(self) -> None:
        _require_types(self, self.children)

    def __str__(self) -> str:
        pairs = zip(self.names, self.children, strict=True)
        items = ", ".join(f".{name}: {child}" for name, child in pairs)
        return f"{class_name(self.cls)}({items})" if items else class_name(self.cls)


@dataclass(frozen=True)
class TSModuleType:
    """The type of one ``nn.Module`` instance; instances of one class can have different types.

    It is not a `TSType`: it can't be written as an annotation, and does not compose. If a type is
    needed, the type of a module is its class, a `TSCustomClass`.
    """

    cls: type
    attributes: tuple[tuple[str, TSAllType], ...]

    def __str__(self) -> str:
        attributes = ", ".join(f"{name}: {type_}" for name, type_ in self.attributes)
        return f"{class_name(self.cls)}({attributes})"


TSStructuralType: TypeAlias = (
    TSTuple | TSNamedTuple | TSList | TSDict | TSOptional | TSFuture | TSRRef
)
TSNominalType: TypeAlias = TSBuiltinClass | TSTensor | TSCustomClass | TSEnum | TSModuleInterface
TSCallType: TypeAlias = Value | TSUnion | TSTupleOf | TSPytree | TSFields
TSType: TypeAlias = TSMetaType | TSPrimitiveType | TSStructuralType | TSNominalType | TSCallType
Descriptor: TypeAlias = TSType
TSInstanceClass: TypeAlias = TSModuleType
TSAllType: TypeAlias = TSType | TSInstanceClass

# For isinstance: Python 3.10 does not accept a union that is written as an alias of aliases.
TS_TYPES = (
    TSMetaType, TSPrimitiveType, TSTuple, TSNamedTuple, TSList, TSDict, TSOptional, TSFuture,
    TSRRef, TSTensor, TSBuiltinClass, TSCustomClass, TSEnum, TSModuleInterface,
    Value, TSUnion, TSTupleOf, TSPytree, TSFields,
)  # fmt: skip

ANY = TSMetaType()
INT = TSPrimitiveType("int")
FLOAT = TSPrimitiveType("float")
DOUBLE = TSPrimitiveType("double")
BOOL = TSPrimitiveType("bool")
STR = TSPrimitiveType("str")
NONE = TSPrimitiveType("None")
TENSOR = TSTensor()
PRIMITIVES = (INT, FLOAT, DOUBLE, BOOL, STR, NONE)


def key_error(key: TSType, value: TSType) -> AnnotationError:
    """Return the error of a dict whose key type is not allowed."""
    return AnnotationError(
        f"Dict[{key}, {value}]: the keys of a dict are str, int, float, bool, Tensor or Any, "
        f"not {key}"
    )


def assert_never(value: NoReturn) -> NoReturn:
    """The end of a match over a union: type checkers prove that it is not reached."""
    if not isinstance(value, TS_TYPES):
        raise AnnotationError(
            f"expected a type of the language, got {value!r} of type {type(value).__name__}; "
            f"tsfunc.types.from_annotation makes a type of it"
        )
    raise AssertionError(f"not handled: {value!r}")


@folding()
def optional(element: TSType) -> TSType:
    """Return the type of values of type `element` or None, in its normal form.

    Example:
        >>> print(optional(INT), optional(optional(INT)), optional(NONE), optional(ANY))
        Optional[int] Optional[int] None Any
    """
    return element if _holds_none(element) else TSOptional(element)


def _holds_none(type_: TSType) -> bool:
    return type_ in (NONE, ANY) or isinstance(type_, TSOptional)


def is_key_type(key: TSAllType) -> bool:
    """True if annotations allow dicts with such keys."""
    return key in (STR, INT, FLOAT, BOOL, ANY) or isinstance(key, TSTensor)


def may_be_key(key: TSType) -> bool:
    """True if a dict can have such keys."""
    return key != NONE and not isinstance(key, TSOptional | TSList | TSDict | TSFuture | TSRRef)


def alternatives_of(type_: TSType) -> tuple[TSType, ...]:
    """Return the alternatives of a union; for any other type, the type itself."""
    if isinstance(type_, TSOptional):
        return type_.element, NONE
    return type_.alternatives if isinstance(type_, TSUnion) else (type_,)


def children_of_type(type_: TSType) -> tuple[TSType, ...]:
    """Return the types that a type is composed of."""
    match type_:
        case TSTuple(elements) | TSNamedTuple(elements=elements):
            return elements
        case TSList(element) | TSOptional(element) | TSFuture(element) | TSRRef(element):
            return (element,)
        case TSTupleOf(element):
            return (element,)
        case TSDict(key, value):
            return key, value
        case TSUnion(alternatives):
            return alternatives
        case TSPytree(children=children) | TSFields(children=children):
            return children
        case (
            TSMetaType() | TSPrimitiveType() | TSTensor() | TSBuiltinClass() | TSCustomClass()
            | TSEnum() | TSModuleInterface() | Value()
        ):  # fmt: skip
            return ()
        case _:
            assert_never(type_)


def with_children(type_: TSType, children: Iterable[TSType]) -> TSType:
    """Return a type of the same kind with other children; the type itself if they are the same."""
    new = tuple(children)
    if all(map(operator.is_, new, children_of_type(type_))):
        return type_
    match type_:
        case TSTuple():
            return TSTuple(new)
        case TSNamedTuple(names):
            return TSNamedTuple(names, new)
        case TSOptional():
            return optional(*new)
        case TSList() | TSFuture() | TSRRef() | TSDict() | TSTupleOf():
            return type(type_)(*new)
        case TSUnion():
            return TSUnion(new)
        case TSPytree(kind, entries):
            return TSPytree(kind, entries, new)
        case TSFields(cls, names):
            return TSFields(cls, names, new)
        case (
            TSMetaType() | TSPrimitiveType() | TSTensor() | TSBuiltinClass() | TSCustomClass()
            | TSEnum() | TSModuleInterface() | Value()
        ):  # fmt: skip
            return type_
        case _:
            assert_never(type_)


def map_tensors(type_: TSType, func: Callable[[MetaTensorType], MetaTensorType]) -> TSType:
    """Return a type with the metadata of each tensor in it replaced."""
    if isinstance(type_, TSTensor):
        return TSTensor(type_.cls, func(type_.meta))
    children = children_of_type(type_)
    return with_children(type_, [map_tensors(child, func) for child in children])


def _require_types(composed: object, children: tuple[object, ...]) -> None:
    """Raise unless all children are of `TSType`: not Python classes, and not `TSModuleType`."""
    for child in children:
        if isinstance(child, TSModuleType):
            raise AnnotationError(
                f"{type(composed).__name__}: {class_name(child.cls)} is the type of one "
                f"module, which can't be part of another type, because another module of that "
                f"class can have other attributes; use the class itself: TSCustomClass(cls)"
            )
        if not isinstance(child, TS_TYPES):
            raise AnnotationError(
                f"{type(composed).__name__} is composed of types, got {child!r} of type "
                f"{type(child).__name__}; tsfunc.types.from_annotation makes a type of it"
            )
