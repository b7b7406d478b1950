"""The types of the values of several types: unions and optionals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tsfunc.errors import AnnotationError
from tsfunc.types.base import ComposedType, Order, TSType, only_part
from tsfunc.types.check_codegen import CheckCode
from tsfunc.types.check_context import CheckContext
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.single import ANY, NONE
from tsfunc.types.values import Path
from tsfunc.user_code import folded_class, folding


class _Union(ComposedType):
    """A type of the values of several types."""

    is_union = True

    @property
    def parts(self) -> tuple[TSType, ...]:
        return self.choices

    @property
    def is_optional(self) -> bool:
        """True for one type or None, in this order."""
        return len(self.choices) == 2 and self.choices[1] == NONE

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if value is None and NONE in self.choices:
            return
        rest = [choice for choice in self.choices if choice != NONE]
        context.first_that_fits(value, rest, self, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        if not self.is_optional:
            return source.undecided(at, self, indent)
        source.lines.append(f"{indent}if {at} is not None:")
        self.choices[0].emit(at, source, indent + "    ")
        source.lines.append(f"{indent}    pass")

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return order.below_any(narrower, self.choices)

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        return {meta for choice in self.choices for meta in choice.governing(path)}


@folded_class
@dataclass(frozen=True)
class TSOptional(_Union):
    """``Optional[X]``: X or None. See NOTE [normal forms]; ``optional`` accepts any type."""

    words: ClassVar = ("Optional",)
    spelling: ClassVar = "Optional[X]"
    steps: ClassVar = ("",)

    element: TSType

    def __post_init__(self) -> None:
        super().__post_init__()
        if _holds_none(self.element):
            raise AnnotationError(
                f"Optional[{self.element}] is {self.element}: write that, or call "
                f"tsfunc.types.optional, which finds the shortest form"
            )

    def __str__(self) -> str:
        return f"Optional[{self.element}]"

    @classmethod
    def compose(cls, name: str, parts: Sequence[TSType]) -> TSType:
        return optional(only_part(name, parts))

    @property
    def parts(self) -> tuple[TSType, ...]:
        return (self.element,)

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        return optional(*parts)

    @property
    def choices(self) -> tuple[TSType, ...]:
        return self.element, NONE


@folded_class
@dataclass(frozen=True)
class TSUnion(_Union):
    """``X | Y``: the first of several types that fits."""

    alternatives: tuple[TSType, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.alternatives))

    def rebuilt(self, parts: tuple[TSType, ...]) -> TSType:
        return TSUnion(parts)

    @property
    def choices(self) -> tuple[TSType, ...]:
        return self.alternatives

    @property
    def closed(self) -> bool:
        return self.is_optional

    def as_python(self) -> str:
        return f"Union[{', '.join(alternative.as_python() for alternative in self.alternatives)}]"


@folding()
def optional(element: TSType) -> TSType:
    """Return the type of values of type ``element`` or None, in its normal form.

    Example:
        >>> from tsfunc.types import ANY, INT, NONE
        >>> print(optional(INT), optional(optional(INT)), optional(NONE), optional(ANY))
        Optional[int] Optional[int] None Any
    """
    return element if _holds_none(element) else TSOptional(element)


def _holds_none(type_: TSType) -> bool:
    return type_ in (NONE, ANY) or isinstance(type_, TSOptional)
