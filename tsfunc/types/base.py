"""The base class of types: every operation of the library on a type is a method.

A new type is a subclass of ``TSType`` in ``single.py`` or ``containers.py``, and its name in
``grammar.py``. Only the check and the order have no defaults. The functions that work on all types
(``checker``, ``check_codegen``, ``lattice``, ``text`` and others) call these methods.

NOTE [normal forms]
Two types that are subtypes of each other are equal, so that types can be compared, hashed and
printed. ``Optional`` therefore does not contain ``None``, ``Any`` or another ``Optional``:
``optional`` returns the normal form of such a spelling, and the constructor rejects it. Names of
sizes are an exception: ``f32[n]`` and ``f32[m]`` alone are equivalent.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tsfunc.errors import AnnotationError
from tsfunc.types.check_codegen import CheckCode
from tsfunc.types.check_context import CheckContext
from tsfunc.types.dims import DimForm
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.size_matching import SizeMatch
from tsfunc.types.values import Path


class TSAllType(abc.ABC):
    """A ``TSType``, or the type of one module, which does not compose."""

    @abc.abstractmethod
    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        """Add every mismatch between a value and this type to the context."""

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        """Add the code of a check that returns False if the variable ``at`` lacks this type.

        Without code of its own, a type is checked by ``check``.
        """
        source.undecided(at, self, indent)


class TSType(TSAllType):
    """A type of the language.

    Attributes:
        words: the names before the brackets in text: ``List`` in ``List[X]``.
        spelling: an example of the text with brackets: ``List[X]``.
        language_only: True if the brackets have a type of the language in descriptors too.
        invariant: True if a value of the type can be written to, so that a type of other elements
            is neither below nor above it.
        is_union: True for a type of the values of several types.
        by_parts: True if the join of two such types is the type of the joins of their parts.
    """

    words: ClassVar[tuple[str, ...]] = ()
    spelling: ClassVar[str] = ""
    language_only: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    by_parts: ClassVar[bool] = False
    is_union: ClassVar[bool] = False

    # --- composition

    @classmethod
    def has_origin(cls, origin: type) -> bool:
        """True if typing objects with an origin (``list`` of ``list[X]``) are such types."""
        return False

    @classmethod
    def compose(cls, name: str, parts: Sequence[TSType]) -> TSType:
        """Return the type that an annotation ``name[parts]`` stands for.

        Raises:
            AnnotationError: the number of parts is wrong, or a part is not allowed.
        """
        make: Callable[..., TSType] = cls
        return make(only_part(name, parts))

    @property
    def parts(self) -> tuple[TSType, ...]:
        """The types that this type is composed of."""
        return ()

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        """Return a type of the same kind with other parts."""
        return type(self)(*parts) if parts else self

    def with_parts(self, parts: Sequence[TSType]) -> TSType:
        """Return a type of the same kind with other parts; itself if they are the same."""
        same = all(new is old for new, old in zip(parts, self.parts, strict=True))
        return self if same else self.rebuilt(tuple(parts))

    def differs_in_parts(self, other: TSType) -> bool:
        """True if another type is of the same kind, with the same number of parts."""
        return (
            type(other) is type(self)
            and len(other.parts) == len(self.parts)
            and self.with_parts(other.parts) == other
        )

    def map_tensors(self, func: Callable[[MetaTensorType], MetaTensorType]) -> TSType:
        """Return this type with the metadata of each tensor in it replaced."""
        return self.with_parts([part.map_tensors(func) for part in self.parts])

    @property
    def steps(self) -> tuple[str | None, ...]:
        """The text that leads from a value to each part: ``[0]``, ``.name``, ``[...]``.

        None stands for a type that no single part of the value has: of keys, of an alternative.
        """
        return (None,) * len(self.parts)

    def child_at(self, path: Path) -> TSType | None:
        """Return the type of the part at the first entry of a path; None if there is none."""
        return None

    @property
    def closed(self) -> bool:
        """True if the generated code checks the parts; False if it leaves them to ``check``."""
        return True

    @property
    def choices(self) -> tuple[TSType, ...]:
        """The alternatives of a union; for any other type, the type itself."""
        return (self,)

    # --- the values

    @property
    def value_class(self) -> type | None:
        """The class of all values; None if their classes can differ."""
        return None

    @property
    def nominal_class(self) -> type | None:
        """The class of all values, or their interface; None if these can differ."""
        return self.value_class

    @property
    def described(self) -> MetaTensorType | None:
        """The metadata of the tensor that this type describes; None for other types."""
        return None

    def fits_class(self, cls: type) -> bool:
        """True if each value is an instance of a class.

        In the language neither a bool nor the member of an enum is an int.
        """
        value_class = self.value_class
        return (
            value_class is not None
            and issubclass(value_class, cls)
            and (cls not in SINGLE or value_class is cls)
        )

    def element_types(self, kind: type) -> Sequence[TSType] | None:
        """Return the types of the elements of a list or tuple; None for other types."""
        return None

    def entries_of(self, kind: type) -> Sequence[Any]:
        """Return the entries of a container of a kind; nothing if it can have any entries."""
        return ()

    @property
    def element_names(self) -> tuple[str, ...] | None:
        """The names of a named tuple's elements; None for other types."""
        return None

    @property
    def key_types(self) -> Sequence[TSType]:
        """The types of the keys of a dict."""
        return ()

    @property
    def item_types(self) -> Sequence[TSType]:
        """The types of the values of a dict."""
        return ()

    @property
    def dims(self) -> list[DimForm]:
        """All sizes in the type."""
        return [dim for part in self.parts for dim in part.dims]

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        """Return the metadata that can describe a tensor at a path in a value.

        None in the set means that the tensor can be without a description.
        """
        return {None} if path else set()

    # --- the order

    @abc.abstractmethod
    def is_above(self, narrower: TSType, order: Order) -> bool:
        """True if a type, which is not a union, is below this type."""

    # --- text

    def as_python(self) -> str:
        """Return the type as Python code, for a scope that has imported its names."""
        return str(self)


SINGLE: tuple[type, ...] = (int, float, str)
"""Classes whose subclasses have values that are not of the type of the class."""


@dataclass(frozen=True)
class Order:
    """The comparison of types, under the names of sizes that are assigned so far.

    Attributes:
        of_call: True for types of a call's arguments, see NOTE [the order of descriptors]; False
            for types of the language.
    """

    sizes: SizeMatch
    of_call: bool

    def below(self, narrower: TSType, wider: TSType) -> bool:
        """True if one type is below another."""
        if narrower.is_union:
            return all(self.below(choice, wider) for choice in narrower.choices)
        return wider.is_above(narrower, self)

    def below_any(self, narrower: TSType, alternatives: Sequence[TSType]) -> bool:
        """True if a type is below an alternative; the first such assigns its names."""
        for wider in alternatives:
            trial = self.sizes.copy()
            if Order(trial, self.of_call).below(narrower, wider):
                self.sizes.adopt(trial)
                return True
        return False

    def all_below(self, narrower: Sequence[TSType] | None, wider: TSType) -> bool:
        """True if there are types, each below one type."""
        return narrower is not None and all(self.below(element, wider) for element in narrower)

    def pairs_below(self, ones: Sequence[TSType] | None, others: Sequence[TSType]) -> bool:
        """True if there are as many types as others, each below the other at its position."""
        return ones is not None and len(ones) == len(others) and all(map(self.below, ones, others))

    def may_differ(self, narrower: TSType, wider: TSType) -> bool:
        """Return False if a type that can be written to differs by more than tensor metadata."""
        if self.of_call or not wider.invariant or type(narrower) is not type(wider):
            return True
        return plain(narrower) == plain(wider)


def plain(type_: TSType) -> TSType:
    """Return a type without the metadata of its tensors."""
    return type_.map_tensors(lambda meta: MetaTensorType())


def only_part(name: str, parts: Sequence[TSType]) -> TSType:
    """Return the type in the brackets of ``name[X]``."""
    if len(parts) != 1:
        raise AnnotationError(f"{name}: expected one type, got {len(parts)}")
    return parts[0]


def require_types(composed: object, parts: Sequence[object]) -> None:
    """Raise unless all parts are of ``TSType``: not Python classes, and not a module's type."""
    for child in parts:
        if isinstance(child, TSType):
            continue
        if isinstance(child, TSAllType):
            raise AnnotationError(
                f"{type(composed).__name__}: {child} is the type of one module, which can't be "
                f"part of another type, because another module of that class can have other "
                f"attributes; use the class itself: TSCustomClass(cls)"
            )
        raise AnnotationError(
            f"{type(composed).__name__}: expected types of tsfunc.types, got {child!r} of type "
            f"{type(child).__name__}; tsfunc.types.from_annotation makes a type of it"
        )


class ComposedType(TSType):
    """A type with parts."""

    def __post_init__(self) -> None:
        require_types(self, self.parts)
