"""The types without parts: any value, single values, tensors, and classes."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tsfunc.types.base import SINGLE, Order, TSAllType, TSType
from tsfunc.types.check_codegen import CheckCode
from tsfunc.types.check_context import CheckContext
from tsfunc.types.dims import DimForm
from tsfunc.types.meta import MetaTensorType, describes_less
from tsfunc.types.values import Path, class_name, describe, literal_text, same_value


@dataclass(frozen=True)
class TSMetaType(TSType):
    """``Any``: every value. A signature may have it, but nothing can be computed with it."""

    name: Literal["Any"] = "Any"

    def __str__(self) -> str:
        return self.name

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        return

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        return

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return True

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        return {None}


@dataclass(frozen=True)
class TSPrimitiveType(TSType):
    """A named type of single values; a ``bool`` is not an ``int``."""

    name: Literal["int", "float", "double", "bool", "str", "None"]

    def __str__(self) -> str:
        return self.name

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if self == NONE:
            return context.literal(value, None, path)
        primitive = primitive_of(value)
        if primitive != self and not (primitive == FLOAT and self == DOUBLE):
            context.fail(path, "", self, describe(value))

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        if self == NONE:
            return source.refuse(f"{at} is not None", indent)
        cls = PYTHON_CLASSES[self.name]
        derived = source.name(functools.partial(_is_derived, cls.__name__))
        exact = f"{source.name(type)}({at}) is not {source.name(cls)}"
        source.refuse(f"{exact} and not {derived}({at})", indent)

    @property
    def value_class(self) -> type:
        return PYTHON_CLASSES[self.name]

    def is_above(self, narrower: TSType, order: Order) -> bool:
        primitive = primitive_of(narrower.value) if isinstance(narrower, Value) else narrower
        return primitive == self or (primitive == FLOAT and self == DOUBLE)


@dataclass(frozen=True, eq=False)
class Value(TSType):
    """A single value, also one that would otherwise be a descriptor (a class, a container).

    Args:
        value: the value that the argument must equal; see ``same_value``.

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

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        context.literal(value, self.value, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        source.literal(at, self.value, indent)

    @property
    def value_class(self) -> type:
        return type(self.value)

    @property
    def described(self) -> MetaTensorType | None:
        return MetaTensorType.of(self.value) if isinstance(self.value, torch.Tensor) else None

    def fits_class(self, cls: type) -> bool:
        derived = cls in SINGLE and isinstance(self.value, cls)
        is_primitive = str(primitive_of(self.value)) == cls.__name__ if derived else False
        return is_primitive or super().fits_class(cls)

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return narrower == self

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        return {None} if path or isinstance(self.value, torch.Tensor) else set()

    def as_python(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class TSTensor(TSType):
    """``Tensor`` or a class derived from it; ``meta`` has the known metadata."""

    cls: type[torch.Tensor] = torch.Tensor
    meta: MetaTensorType = MetaTensorType()  # noqa: RUF009  frozen

    def __str__(self) -> str:
        has_meta = self.meta != MetaTensorType()
        if self.cls is torch.Tensor:
            return str(self.meta) if has_meta else "Tensor"
        name = class_name(self.cls)
        return f"Annotated[{name}, {self.meta}]" if has_meta else name

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if self.cls is torch.Tensor or context.instance(value, self.cls, path):
            context.tensor(value, self.meta, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        exact = f"{source.name(type)}({at}) is not {source.name(torch.Tensor)} and "
        unlike = source.no_instance(at, self.cls)
        source.refuse(exact + unlike if self.cls is torch.Tensor else unlike, indent)
        source.tensor(at, self.meta, indent)

    def map_tensors(self, func: Any) -> TSType:
        return TSTensor(self.cls, func(self.meta))

    @property
    def value_class(self) -> type:
        return self.cls

    @property
    def described(self) -> MetaTensorType:
        return self.meta

    @property
    def dims(self) -> list[DimForm]:
        return list(self.meta.sizes)

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        if self.cls is not torch.Tensor and self.meta == MetaTensorType():
            return {None}
        return set() if path else {self.meta}

    def is_above(self, narrower: TSType, order: Order) -> bool:
        narrower_meta = narrower.described
        described = narrower_meta is not None and describes_less(
            narrower_meta, self.meta, order.sizes
        )
        return described and self.cls in (narrower.value_class or object).__mro__

    def as_python(self) -> str:
        if self.cls is not torch.Tensor:
            return str(self)
        text, shape = repr(self.meta), self.meta.shape
        # A list is easier to read, and is the form in the documentation.
        return text if shape is None else text.replace(f"{shape=!r}", f"shape={[*shape]!r}")


@dataclass(frozen=True)
class _TSClass(TSType):
    """A class whose instances are the values."""

    cls: type

    def __str__(self) -> str:
        return class_name(self.cls)

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if context.instance(value, self.cls, path) and dataclasses.is_dataclass(self.cls):
            context.declared_fields(value, self.cls, path)

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        source.refuse(source.no_instance(at, self.cls), indent)

    @property
    def value_class(self) -> type:
        return self.cls

    def governing(self, path: Path) -> set[MetaTensorType | None]:
        return {None} if path or issubclass(torch.Tensor, self.cls) else set()

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return narrower.fits_class(self.cls)


@dataclass(frozen=True)
class TSBuiltinClass(_TSClass):
    """A class of torch that is part of the language: ``torch.device``, ``torch.dtype``."""


@dataclass(frozen=True)
class TSCustomClass(_TSClass):
    """Any other class, whose attributes are checked at their use (see ``attribute_type``)."""

    def emit(self, at: str, source: CheckCode, indent: str) -> None:
        # Only for a class without fields and without a custom metaclass does isinstance decide.
        if dataclasses.is_dataclass(self.cls) or type(self.cls) not in (type, abc.ABCMeta):
            return source.undecided(at, self, indent, self.cls)
        super().emit(at, source, indent)


@dataclass(frozen=True)
class TSEnum(_TSClass):
    """An enum whose members are all ints, all floats or all strs."""

    cls: type[enum.Enum]


@dataclass(frozen=True)
class TSModuleInterface(TSType):
    """A class that consists of abstract methods with annotated arguments."""

    cls: type

    def __str__(self) -> str:
        return class_name(self.cls)

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        context.methods(value, self.cls, path)

    @property
    def nominal_class(self) -> type:
        return self.cls

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return self.cls in (narrower.nominal_class or object).__mro__


@dataclass(frozen=True)
class TSModuleType(TSAllType):
    """The type of one ``nn.Module`` instance; instances of one class can have different types.

    The class is not a ``TSType``: its instances can't be written as an annotation, and does not
    compose. If a type is needed, the type of a module is its class, a ``TSCustomClass``.
    """

    cls: type
    attributes: tuple[tuple[str, TSAllType], ...]

    def __str__(self) -> str:
        attributes = ", ".join(f"{name}: {type_}" for name, type_ in self.attributes)
        return f"{class_name(self.cls)}({attributes})"

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, torch.nn.Module) or type(value) is not self.cls:
            return context.fail(path, "", self, describe(value))
        attributes = context.attributes_of_module(value)
        for name, attribute in self.attributes:
            got = attributes.pop(name, None)
            if got != attribute:
                context.fail(path, f".{name}", attribute, str(got or "no such attribute"))
        for name, attribute in attributes.items():
            context.fail(path, f".{name}", "no such attribute", str(attribute))


ANY = TSMetaType()
INT = TSPrimitiveType("int")
FLOAT = TSPrimitiveType("float")
DOUBLE = TSPrimitiveType("double")
BOOL = TSPrimitiveType("bool")
STR = TSPrimitiveType("str")
NONE = TSPrimitiveType("None")
TENSOR = TSTensor()
PRIMITIVES = (INT, FLOAT, DOUBLE, BOOL, STR, NONE)

PYTHON_CLASSES: dict[str, type] = {
    "int": int,
    "float": float,
    "double": float,
    "bool": bool,
    "str": str,
    "None": type(None),
}
"""The classes of the values of primitive types."""

# The order matters: a bool is an int in Python, but not in the language.
_PRIMITIVES = (
    (bool | torch.SymBool, BOOL),
    (int | torch.SymInt, INT),
    (float | torch.SymFloat, FLOAT),
    (str, STR),
)


def primitive_of(value: Any) -> TSPrimitiveType | None:
    """Return the primitive type of a value, NONE for None; None for a value of another type.

    The members of an enum are not ints, even if they are in Python.
    """
    if value is None:
        return NONE
    if isinstance(value, enum.Enum):
        return None
    return next((type_ for kind, type_ in _PRIMITIVES if isinstance(value, kind)), None)


def _is_derived(kind: str, value: object) -> bool:
    """True if a value of a class derived from int, float or str counts as one."""
    primitive = primitive_of(value)
    return primitive is not None and primitive.name == kind


def literal(value: object) -> TSType:
    """Return the type of one value; the type of None is NONE."""
    return NONE if value is None else Value(value)
