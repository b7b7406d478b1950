"""Nominal types: the kind of a class, and the rules of each kind."""

from __future__ import annotations

import dataclasses
import dis
import enum
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import optree
import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.containers import TSFields
from tsfunc.types.grammar import Descriptor, TSNominalType
from tsfunc.types.single import (
    BOOL,
    FLOAT,
    INT,
    NONE,
    STR,
    TSBuiltinClass,
    TSCustomClass,
    TSEnum,
    TSModuleInterface,
    TSTensor,
)
from tsfunc.user_code import folding

BUILTIN_CLASSES: frozenset[type] = frozenset(
    {
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
        torch.Size,
        torch.Generator,
        torch.Stream,
        torch.Event,
        torch.cuda.Stream,
        torch.cuda.Event,
        torch.nn.ModuleList,
        torch.nn.ModuleDict,
    }
)
"""The classes besides Tensor that are built into the type language."""

_MARK = "__ts_interface__"
_C = TypeVar("_C", bound=type)


def nominal_type(cls: type) -> TSNominalType:
    """Return the type that a class stands for.

    Raises:
        AnnotationError: an enum or an interface breaks the rules of its kind.
    """
    if issubclass(cls, torch.Tensor):
        return TSTensor(cls)
    if cls in BUILTIN_CLASSES:
        return TSBuiltinClass(cls)
    if issubclass(cls, enum.Enum):
        check_enum(cls)
        return TSEnum(cls)
    if is_interface(cls):
        check_interface(cls)
        return TSModuleInterface(cls)
    return TSCustomClass(cls)


def class_type(cls: type) -> Descriptor:
    """Return the type of the instances of a class, without their attributes."""
    primitive = {int: INT, float: FLOAT, bool: BOOL, str: STR, type(None): NONE}.get(cls)
    if primitive is not None:
        return primitive
    has_fields = dataclasses.is_dataclass(cls) and bool(dataclasses.fields(cls))
    if has_fields or optree.is_namedtuple_class(cls):
        return TSFields(cls, (), ())
    return nominal_or_custom(cls)


def nominal_or_custom(cls: type) -> Descriptor:
    """Return the nominal type of a class; an enum that breaks the rules is a custom class."""
    try:
        return nominal_type(cls)
    except AnnotationError:
        return TSCustomClass(cls)


# --- enums


def check_enum(cls: type[enum.Enum]) -> None:
    """Raise unless the members of an enum are literals of one type.

    Python enforces the other rule: an enum with members can't have subclasses.

    Raises:
        AnnotationError: the enum has no members, or values of several or other types.
    """
    values = {name: member.value for name, member in cls.__members__.items()}
    kinds = sorted({type(value).__name__ for value in values.values()})
    if not values:
        raise AnnotationError(
            f"enum {cls.__name__} has no members, so no value has this type; annotate with an "
            f"enum derived from it"
        )
    if len(kinds) > 1 or kinds[0] not in ("int", "float", "str"):
        listed = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        raise AnnotationError(
            f"enum {cls.__name__}: expected members whose values are all int, all float or all "
            f"str, got {' and '.join(kinds)} ({listed})"
        )


# --- interfaces


@folding()
def interface(cls: _C) -> _C:
    """Declare a module interface: a decorator for a class of abstract methods.

    Any value with such methods fits an annotation with the interface. A ``typing.Protocol`` is an
    interface without this decorator.

    Raises:
        AnnotationError: the class has attributes, a constructor, a method with a body, or an
            argument without annotation.

    Example:
        >>> @interface
        ... class Encoder(torch.nn.Module):
        ...     def encode(self, x: torch.Tensor, depth: int) -> torch.Tensor: ...
        >>> print(nominal_type(Encoder).cls.__name__)
        Encoder

    Source: ``torch.jit.interface`` as the TorchScript type system proposal describes it.
    """
    if not isinstance(cls, type):
        raise AnnotationError(f"interface: expected a class, got {cls!r}")
    setattr(cls, _MARK, True)
    check_interface(cls)
    return cls


def is_interface(cls: type) -> bool:
    """True if the class itself, not only a base class, is an interface."""
    namespace = vars(cls)
    # torch.jit.interface marks a class by the second name.
    marked = _MARK in namespace or "__torch_script_interface__" in namespace
    return marked or bool(namespace.get("_is_protocol", False))


def interface_methods(cls: type) -> dict[str, types.FunctionType]:
    """Return the methods that an interface requires, including those of interfaces it extends."""
    return {
        name: value
        for home in reversed(cls.__mro__)
        if is_interface(home) and home not in (typing.Protocol, typing.Generic)
        for name, value in vars(home).items()
        if isinstance(value, types.FunctionType) and not _is_machinery(name, value)
    }


def check_interface(cls: type) -> None:
    """Raise unless an interface has only methods without bodies and with annotated arguments."""
    faults = list(_faults(cls))
    if faults:
        raise AnnotationError(
            f"interface {cls.__name__} may have abstract methods with annotated arguments, and "
            f"nothing else: {'; '.join(faults)}"
        )


def _faults(cls: type) -> Iterator[str]:
    for base in cls.__mro__[1:]:
        plain = base in (object, torch.nn.Module, typing.Protocol, typing.Generic)
        if not plain and base.__name__ != "ABC" and not is_interface(base):
            yield f"it is derived from {base.__name__}, which is not an interface"
    namespace = vars(cls)
    for name in inspect.get_annotations(cls):
        yield f"it has the attribute {name}"
    for name, value in namespace.items():
        if _is_machinery(name, value):
            continue
        if name == "__init__":
            yield "it has a constructor"
        elif isinstance(value, types.FunctionType):
            yield from _method_faults(name, value)
        elif name not in inspect.get_annotations(cls):
            yield f"{name} is a {type(value).__name__}"


def _is_machinery(name: str, value: Any) -> bool:
    """True for an entry that Python, abc or typing adds to a class."""
    if isinstance(value, types.FunctionType):
        return value.__module__ in ("typing", "typing_extensions", "abc")
    return name.startswith("_")


def _method_faults(name: str, method: types.FunctionType) -> Iterator[str]:
    _, *parameters = inspect.signature(method).parameters.values() or [None]
    missing = [p.name for p in parameters if p is not None and p.annotation is p.empty]
    if missing:
        yield f"{name} has no annotation for {', '.join(missing)}"
    if not _is_empty(method):
        yield f"{name} has a body"


_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}


def _is_empty(method: types.FunctionType) -> bool:
    """True if a body is a docstring, ``pass``, ``...`` or ``raise NotImplementedError``."""
    code = method.__code__
    if code.co_names == ("NotImplementedError",):
        return any(step.opname == "RAISE_VARARGS" for step in dis.get_instructions(code))
    nothing = all(step.opname in _NOTHING for step in dis.get_instructions(code))
    return nothing and all(constant in (None, method.__doc__) for constant in code.co_consts)
