"""Attribute resolution: the type of an attribute, a method or an operator of a type.

A class is not checked at its declaration or annotation; only attributes that are used must exist.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from typing import Any, TypeAlias

import torch

from tsfunc.errors import AnnotationError, TypeCheckError
from tsfunc.types.annotation import attribute_types
from tsfunc.types.classes import interface_methods
from tsfunc.types.descriptors import PYTHON_CLASSES
from tsfunc.types.grammar import (
    ANY,
    STR,
    TENSOR,
    TSAllType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFields,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSModuleType,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSPytree,
    TSRRef,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSType,
    TSUnion,
    Value,
    assert_never,
    optional,
)
from tsfunc.types.inference import of_value
from tsfunc.types.signatures import Signature, signature

Resolved: TypeAlias = TSAllType | Signature
"""The type of a data attribute, or the signature of a method."""


def attribute_type(type_: TSAllType, name: str, *, of: str = "a value") -> Resolved:
    """Return the type of an attribute of the values of a type.

    Args:
        type_: the type.
        name: the attribute; operators have Python's names (``"__add__"``).
        of: the value's name, for error messages.

    Returns:
        The type of a data attribute, or the `Signature` of a method. The signature of a method in C
        accepts any arguments.

    Raises:
        TypeCheckError: values of this type lack the attribute, can be None, or have an unknown type
            (`Any`).

    Example:
        >>> from tsfunc.types import parse
        >>> print(attribute_type(parse("Tensor"), "shape"))
        torch.Size
        >>> print(attribute_type(parse("namedtuple(x: Tensor, n: int)"), "n"))
        int
        >>> attribute_type(parse("Any"), "shape", of="x")
        Traceback (most recent call last):
        ...
        tsfunc.errors.TypeCheckError: x.shape: x is of type Any, of which nothing is known, so \
that nothing can be computed with it. Say what it is where it comes from: annotate it, or describe \
it, with a concrete type.

    Source: the check of attribute resolution in the TorchScript type system proposal.
    """
    try:
        return _resolve(type_, name, of)
    except AnnotationError as error:
        raise TypeCheckError(f"{of}.{name}: {error}") from None


def _resolve(type_: TSAllType, name: str, of: str) -> Resolved:
    match type_:
        case TSMetaType():
            raise TypeCheckError(
                f"{of}.{name}: {of} is of type Any, of which nothing is known, so that nothing can "
                f"be computed with it. Say what it is where it comes from: annotate it, or "
                f"describe it, with a concrete type."
            )
        case TSOptional(element):
            raise TypeCheckError(
                f"{of}.{name}: {of} is of type {type_} and may be None; test `{of} is not None` "
                f"first, after which it is of type {element}."
            )
        case TSPrimitiveType(primitive):
            return _of_class(PYTHON_CLASSES[primitive], type_, name, of)
        case TSNamedTuple(names, elements):
            found = dict(zip(names, elements, strict=True)).get(name)
            return _of_class(tuple, type_, name, of) if found is None else found
        case TSUnion():
            raise TypeCheckError(
                f"{of}.{name}: {of} is of type {type_}, one of several; test which one first."
            )
        case Value(value):
            return _of_class(type(value), type_, name, of)
        case TSFields(cls, names, children):
            declared = dict(zip(names, children, strict=True)).get(name)
            return _of_class(cls, type_, name, of) if declared is None else declared
        case TSPytree(kind):
            return _of_class(kind, type_, name, of)
        case TSTuple() | TSTupleOf():
            return _of_class(tuple, type_, name, of)
        case TSList():
            return _of_class(list, type_, name, of)
        case TSDict():
            return _of_class(dict, type_, name, of)
        case TSFuture(element):
            if name in ("wait", "value"):
                return _anything(name, element)
            return _of_class(torch.futures.Future, type_, name, of)
        case TSRRef(element):
            if name in ("to_here", "local_value"):
                return _anything(name, element)
            raise _missing(type_, name, of)
        case TSTensor(cls):
            data = _tensor_attribute(name) if hasattr(torch.Tensor, name) else None
            return _of_class(cls, type_, name, of) if data is None else data
        case TSModuleInterface(cls):
            if name not in interface_methods(cls):
                raise _missing(type_, name, of)
            return signature(interface_methods(cls)[name])
        case TSModuleType(cls, attributes):
            own = dict(attributes).get(name)
            return _of_class(cls, type_, name, of) if own is None else own
        case TSEnum(cls):
            if name in ("name", "value"):
                return STR if name == "name" else of_value(next(iter(cls)).value)
            return _of_class(cls, type_, name, of)
        case TSBuiltinClass(cls) | TSCustomClass(cls):
            return _of_class(cls, type_, name, of)
        case _:
            assert_never(type_)


def _missing(type_: TSAllType, name: str, of: str) -> TypeCheckError:
    return TypeCheckError(f"{of}.{name}: {of} is of type {type_}, which has no {name!r}.")


def _of_class(cls: type, type_: TSAllType, name: str, of: str) -> Resolved:
    """Resolve an attribute of a class: a method, an annotation, a property or a class variable."""
    missing = object()
    value: Any = inspect.getattr_static(cls, name, missing)
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    annotated = attribute_types(cls).get(name)
    if annotated is not None and not isinstance(value, types.FunctionType):
        return annotated
    if value is missing:
        raise _missing(type_, name, of)
    if isinstance(value, property | functools.cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        return ANY if getter is None else signature(getter).returns or ANY
    if isinstance(value, types.FunctionType):
        return signature(value)
    if callable(value):
        return _anything(name)
    if inspect.isdatadescriptor(value):  # a slot, or a field of a class in C
        return ANY
    return of_value(value)


def _tensor_attribute(name: str) -> TSAllType | None:
    """Return the type of a data attribute that all tensors have; None for a method."""
    if name == "grad":
        return optional(TENSOR)
    if not inspect.isdatadescriptor(inspect.getattr_static(torch.Tensor, name)):
        return None
    try:
        value = getattr(torch.empty(1, 1, device="cpu"), name)
    except RuntimeError:  # such as `imag` of a real tensor
        return TENSOR
    return ANY if value is None else of_value(value)


def _anything(name: str, returns: TSType | None = None) -> Signature:
    """Return the signature of a method with unknown parameters."""

    def method(*args: Any, **kwargs: Any): ...  # type: ignore[no-untyped-def]

    method.__name__ = name
    return dataclasses.replace(signature(method), returns=returns)
