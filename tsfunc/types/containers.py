"""The types of containers and of objects with fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tsfunc.errors import AnnotationError
from tsfunc.types.base import ComposedType, Order, TSType
from tsfunc.types.check_codegen import CheckCode
from tsfunc.types.check_context import CheckContext
from tsfunc.types.futures import LaterType
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.single import ANY, BOOL, FLOAT, INT, NONE, STR, TSTensor, literal
from tsfunc.types.unions import TSOptional
from tsfunc.types.values import (
    Path,
    class_name,
    describe,
    entry_text,
    field_names,
    field_text,
    key_text,
    names_of_class,
    path_text,
    same_keys,
    same_value,
)
from tsfunc.user_code import folded_class


class _Container(ComposedType):
    """A type of containers: the entries of a path lead to the parts of a value."""

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        part = self.child_at(path)
        return set() if part is None else part.governing(path[1:])


class _Elements(_Container):
    """A type of lists or of tuples of any length, with elements of one type.

    Attributes:
        kind: the class of the values.
        pattern: the text, with braces for the type of the elements.
    """

    steps = ("[...]",)
    kind: ClassVar[type]
    pattern: ClassVar[str]
    element: TSType

    def __str__(self) -> str:
        return self.pattern.format(self.element)

    def as_python(self) -> str:
        return self.pattern.format(self.element.as_python())

    @property
    def parts(self) -> tuple[TSType, ...]:
        return (self.element,)

    def child_at(self, path: Path) -> TSType | None:
        return self.element if path else None

    @property
    def value_class(self) -> type:
        return self.kind

    def element_types(self, kind: type) -> Sequence[TSType] | None:
        return self.parts if kind is self.kind else None

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        context.elements(value, self.kind, self.element, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        source.elements(at, self.kind, self.element, indent)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return order.may_differ(narrower, self) and order.all_below(
            narrower.element_types(self.kind), self.element
        )


# --- tuples


class _FixedTuple(_Container):
    """A type of tuples with exactly these elements."""

    elements: tuple[TSType, ...]

    @property
    def parts(self) -> tuple[TSType, ...]:
        return self.elements

    def child_at(self, path: Path) -> TSType | None:
        entries = range(len(self.elements))
        return self.elements[entries.index(path[0])] if path and path[0] in entries else None

    @property
    def value_class(self) -> type:
        return tuple

    def element_types(self, kind: type) -> Sequence[TSType] | None:
        return self.elements if kind is tuple else None


@folded_class
@dataclass(frozen=True)
class TSTuple(_FixedTuple):
    """``Tuple[X, Y]``: a tuple with exactly these elements."""

    words: ClassVar = ("Tuple", "tuple")
    spelling: ClassVar = "Tuple[X, Y]"

    elements: tuple[TSType, ...]

    def __str__(self) -> str:
        return f"Tuple[{', '.join(map(str, self.elements)) or '()'}]"

    @classmethod
    def has_origin(cls, origin: type) -> bool:
        return origin is tuple

    @classmethod
    def compose(cls, name: str, parts: Sequence[TSType]) -> TSType:
        return cls(tuple(parts))

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        return TSTuple(parts)

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(f"[{i}]" for i in range(len(self.elements)))

    def entries_of(self, kind: type) -> Sequence[Any]:
        return range(len(self.elements)) if issubclass(tuple, kind) else ()

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        context.items(value, tuple, self.elements, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        source.refuse(source.no_instance(at, tuple), indent)
        source.refuse(f"{source.name(len)}({at}) != {len(self.elements)}", indent)
        source.unpack(at, self.elements, indent)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        fixed = not isinstance(narrower, TSTupleOf)
        return fixed and order.pairs_below(narrower.element_types(tuple), self.elements)

    def as_python(self) -> str:
        items = ", ".join(element.as_python() for element in self.elements)
        return f"({items},)" if len(self.elements) == 1 else f"({items})"


@folded_class
@dataclass(frozen=True)
class TSNamedTuple(_FixedTuple):
    """``namedtuple(a: X, b: Y)``: like ``TSTuple``, with a name for each element.

    The type is structural: the class of a named tuple does not matter.
    """

    names: tuple[str, ...]
    elements: tuple[TSType, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.names) != len(self.elements) or len(set(self.names)) != len(self.names):
            raise AnnotationError(
                f"TSNamedTuple: expected a different name for each element, got names "
                f"{list(self.names)} for {len(self.elements)} element(s)"
            )

    def __str__(self) -> str:
        pairs = zip(self.names, self.elements, strict=True)
        return f"namedtuple({', '.join(f'{name}: {element}' for name, element in pairs)})"

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        return TSNamedTuple(self.names, parts)

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(f".{name}" for name in self.names)

    @property
    def element_names(self) -> tuple[str, ...]:
        return self.names

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if field_names(value) != self.names:
            expected = f"a named tuple of {', '.join(self.names)}"
            return context.fail(path, "", expected, describe(value))
        context.items(value, tuple, self.elements, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        source.refuse(f"{source.field_names(at)} != {self.names!r}", indent)
        source.unpack(at, self.elements, indent)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        same = narrower.element_names == self.names
        return same and order.pairs_below(narrower.element_types(tuple), self.elements)


@folded_class
@dataclass(frozen=True)
class TSTupleOf(_Elements):
    """``Tuple[X, ...]``: a tuple of any length."""

    kind: ClassVar = tuple
    pattern: ClassVar = "Tuple[{}, ...]"

    element: TSType


# --- lists and dicts


@folded_class
@dataclass(frozen=True)
class TSList(_Elements):
    """``List[X]``: a list of any length."""

    words: ClassVar = ("List", "list")
    spelling: ClassVar = "List[X]"
    invariant: ClassVar = True
    kind: ClassVar = list
    pattern: ClassVar = "List[{}]"

    element: TSType

    @classmethod
    def has_origin(cls, origin: type) -> bool:
        return origin is list


@folded_class
@dataclass(frozen=True)
class TSDict(_Container):
    """``Dict[K, V]``: a dict of any size; K is str, int, float, bool, Tensor or Any."""

    words: ClassVar = ("Dict", "dict")
    spelling: ClassVar = "Dict[K, V]"
    invariant: ClassVar = True
    steps: ClassVar = (None, "[...]")

    key: TSType
    value: TSType

    def __post_init__(self) -> None:
        super().__post_init__()
        if not may_be_key(self.key):
            raise key_error(self.key, self.value)

    def __str__(self) -> str:
        return f"Dict[{self.key}, {self.value}]"

    @classmethod
    def has_origin(cls, origin: type) -> bool:
        return origin is dict

    @classmethod
    def compose(cls, name: str, parts: Sequence[TSType]) -> TSType:
        if len(parts) != 2:
            raise AnnotationError(
                f"{name}: expected a key and a value type, got {len(parts)} type(s)"
            )
        if not is_key_type(parts[0]):
            raise key_error(*parts)
        return cls(*parts)

    @property
    def parts(self) -> tuple[TSType, ...]:
        return self.key, self.value

    def child_at(self, path: Path) -> TSType | None:
        return self.value if path else None

    @property
    def value_class(self) -> type:
        return dict

    @property
    def key_types(self) -> Sequence[TSType]:
        return (self.key,)

    @property
    def item_types(self) -> Sequence[TSType]:
        return (self.value,)

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, dict):
            return context.fail(path, "", "a dict", describe(value))
        for key, item in value.items():
            self.key.check(key, (f"a key of {path_text(path, context.roots)}",), context)
            self.value.check(item, (*path, key), context)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        source.refuse(source.no_instance(at, dict), indent)
        key, item = source.variable(), source.variable()
        pairs = ((key, self.key), (item, self.value))
        source.loop(f"{key}, {item}", f"{at}.items()", pairs, indent)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return (
            narrower.value_class is dict
            and order.may_differ(narrower, self)
            and order.all_below(narrower.key_types, self.key)
            and order.all_below(narrower.item_types, self.value)
        )

    def as_python(self) -> str:
        return f"Dict[{self.key.as_python()}, {self.value.as_python()}]"


def key_error(key: TSType, value: TSType) -> AnnotationError:
    """Return the error of a dict whose key type is not allowed."""
    return AnnotationError(
        f"Dict[{key}, {value}]: the keys of a dict are str, int, float, bool, Tensor or Any, "
        f"not {key}"
    )


def is_key_type(key: object) -> bool:
    """True if annotations allow dicts with such keys."""
    return key in (STR, INT, FLOAT, BOOL, ANY) or isinstance(key, TSTensor)


def may_be_key(key: TSType) -> bool:
    """True if a dict can have such keys."""
    return key != NONE and not isinstance(key, TSOptional | TSList | TSDict | LaterType)


@folded_class
@dataclass(frozen=True, eq=False)
class TSPytree(_Container):
    """A container with exactly these children; a tuple is a ``TSTuple`` instead.

    Args:
        kind: ``list``, ``dict``, or another container class of optree.
        entries: optree's names for the children.
    """

    kind: type
    entries: tuple[Any, ...]
    children: tuple[TSType, ...]

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

    @property
    def parts(self) -> tuple[TSType, ...]:
        return self.children

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        return TSPytree(self.kind, self.entries, parts)

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(entry_text(self.kind, entry) for entry in self.entries)

    def child_at(self, path: Path) -> TSType | None:
        is_entry = bool(path) and path[0] in self.entries
        return self.children[self.entries.index(path[0])] if is_entry else None

    @property
    def value_class(self) -> type:
        return self.kind

    @property
    def closed(self) -> bool:
        return False

    def element_types(self, kind: type) -> Sequence[TSType] | None:
        return self.children if issubclass(self.kind, kind) else None

    def entries_of(self, kind: type) -> Sequence[Any]:
        return self.entries if issubclass(self.kind, kind) else ()

    @property
    def element_names(self) -> tuple[str, ...] | None:
        return names_of_class(self.kind)

    @property
    def key_types(self) -> Sequence[TSType]:
        return [literal(entry) for entry in self.entries_of(dict)]

    @property
    def item_types(self) -> Sequence[TSType]:
        return self.children

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if self.kind in (list, tuple):
            context.items(value, self.kind, self.children, path)
        elif self.kind is dict:
            context.keys(value, dict(zip(self.entries, self.children, strict=True)), path)
        else:
            context.children(value, self.kind, self.entries, self.children, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        if self.kind not in (list, dict):
            return source.undecided(at, self, indent)
        source.refuse(source.no_instance(at, self.kind), indent)
        source.refuse(f"{source.name(len)}({at}) != {len(self.children)}", indent)
        if self.kind is list:
            source.unpack(at, self.children, indent)
        else:
            source.entries(at, self.entries, self.children, indent)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        if not isinstance(narrower, TSPytree) or narrower.kind is not self.kind:
            return False
        if self.kind is not dict:
            same = narrower.entries == tuple(self.entries)
            return same and order.pairs_below(narrower.children, self.children)
        by_key = dict(zip(narrower.entries, narrower.children, strict=True))
        return same_keys(by_key, self.entries) and order.pairs_below(
            [by_key[entry] for entry in self.entries], self.children
        )

    def as_python(self) -> str:
        children = [child.as_python() for child in self.children]
        if self.kind is dict:
            pairs = zip(self.entries, children, strict=True)
            return f"{{{', '.join(f'{key!r}: {child}' for key, child in pairs)}}}"
        return f"[{', '.join(children)}]" if self.kind is list else str(self)


@folded_class
@dataclass(frozen=True)
class TSFields(_Container):
    """An instance of a class, with the types of some of its attributes, or of none."""

    by_parts: ClassVar = True

    cls: type
    names: tuple[str, ...]
    children: tuple[TSType, ...]

    def __str__(self) -> str:
        pairs = zip(self.names, self.children, strict=True)
        items = ", ".join(f".{name}: {child}" for name, child in pairs)
        return f"{class_name(self.cls)}({items})" if items else class_name(self.cls)

    @property
    def parts(self) -> tuple[TSType, ...]:
        return self.children

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        return TSFields(self.cls, self.names, parts)

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(f".{name}" for name in self.names)

    def child_at(self, path: Path) -> TSType | None:
        is_name = bool(path) and str(path[0]) in self.names
        return self.children[self.names.index(str(path[0]))] if is_name else None

    @property
    def value_class(self) -> type:
        return self.cls

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        if not self.names:
            return {None} if path else set()
        return super().governing(path)

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if context.instance(value, self.cls, path):
            context.fields(value, self.cls, self.by_name, path)

    @property
    def closed(self) -> bool:
        return False

    @property
    def by_name(self) -> Mapping[str, TSType]:
        """The types of the attributes."""
        return dict(zip(self.names, self.children, strict=True))

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        if self.names:
            return source.undecided(at, self, indent)
        source.refuse(source.no_instance(at, self.cls), indent)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        others = narrower.by_name if isinstance(narrower, TSFields) else {}
        return narrower.fits_class(self.cls) and order.pairs_below(
            [others.get(name, ANY) for name in self.names], self.children
        )
