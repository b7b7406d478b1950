"""Signatures and attributes: the types of a function's parameters, of its result, of members.

A class is not checked at its declaration or annotation; only attributes that are used must exist.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from tsfunc.errors import AnnotationError, TypeCheckError
from tsfunc.types.annotation import (
    Scope,
    attribute_types,
    class_scope,
    closure_of,
    from_annotation,
)
from tsfunc.types.base import TSAllType, TSType
from tsfunc.types.check_codegen import generate_call, never
from tsfunc.types.check_context import Mismatch
from tsfunc.types.checker import decide, leaves_names_open, mismatches
from tsfunc.types.classes import interface_methods, nominal_type
from tsfunc.types.containers import TSFields, TSNamedTuple
from tsfunc.types.futures import TSFuture, TSRRef
from tsfunc.types.grammar import require_type
from tsfunc.types.inference import of_value
from tsfunc.types.lattice import nominal_view
from tsfunc.types.single import (
    ANY,
    NONE,
    STR,
    TENSOR,
    TSEnum,
    TSMetaType,
    TSModuleInterface,
    TSModuleType,
    TSTensor,
)
from tsfunc.types.unions import TSOptional, TSUnion, optional
from tsfunc.user_code import folded_class, folding

_EMPTY = inspect.Parameter.empty
_ONE, _MANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@folded_class
@dataclass(frozen=True, eq=False)
class Signature:
    """The types of a function's parameters and of its result; ``signature`` makes it.

    Attributes:
        name: the name of the function.
        parameters: parameter name to type, in order; for ``*args`` and ``**kwargs`` the type of
            each argument.
        returns: the type of the result; None if it is not annotated, and therefore inferred.
    """

    name: str
    parameters: Mapping[str, TSType]
    returns: TSType | None
    _signature: inspect.Signature = field(repr=False)

    @functools.cached_property
    def _fits(self) -> Callable[..., bool]:
        if any(map(leaves_names_open, self.parameters.values())):
            return never
        return generate_call(self.name, self._signature, self.parameters, decide)

    def check(self, *args: Any, **kwargs: Any) -> list[Mismatch]:
        """Return every mismatch between an argument of a call and its parameter's type.

        Raises:
            TypeError: the arguments are too many or too few.
        """
        if self._fits(*args, **kwargs):
            return []
        return mismatches(
            (name, value, type_)
            for parameter, argument in self._signature.bind(*args, **kwargs).arguments.items()
            for name, value, type_ in self._values(parameter, argument)
        )

    def _values(self, parameter: str, argument: Any) -> list[tuple[str, Any, TSType]]:
        kind, type_ = self._signature.parameters[parameter].kind, self.parameters[parameter]
        if kind is _ONE:
            return [(f"{parameter}[{i}]", value, type_) for i, value in enumerate(argument)]
        if kind is _MANY:
            return [(name, value, type_) for name, value in argument.items()]
        return [(parameter, argument, type_)]

    def __str__(self) -> str:
        words = []
        for name, parameter in self._signature.parameters.items():
            stars = "*" if parameter.kind is _ONE else "**" if parameter.kind is _MANY else ""
            default = "" if parameter.default is _EMPTY else f" = {parameter.default!r}"
            words.append(f"{stars}{name}: {self.parameters[name]}{default}")
        returns = "" if self.returns is None else f" -> {self.returns}"
        return f"{self.name}({', '.join(words)}){returns}"


@folding()
def signature(func: Any) -> Signature:
    """Return the types of a function's parameters and of its result.

    A parameter has the type of its annotation. Without an annotation, it has the type of its
    default value (an optional tensor for None). Without either it is a Tensor. If the default is
    None, None is allowed regardless of the annotation. ``self`` has the type of its class and must
    not be annotated.

    Args:
        func: a function, a method, a ``functools.partial``, a module, a class, or another
            callable.

    Raises:
        AnnotationError: an annotation is not a type, or ``self`` has one.

    Example:
        >>> def f(x, n: int, scale=1.0, mask=None) -> torch.Tensor: ...
        >>> print(signature(f))
        f(x: Tensor, n: int, scale: float = 1.0, mask: Optional[Tensor] = None) -> Tensor
        >>> print(signature(f).check(torch.ones(2), "three")[0])
        n: expected int, got 'three' (str)

    Source: the rules for annotations in the TorchScript type system proposal.
    """
    if isinstance(func, torch.nn.Module):
        func = func.forward
    try:
        plain = inspect.signature(func)
    except (TypeError, ValueError) as error:
        raise AnnotationError(f"{func!r} has no signature: {error}") from None
    inner = _function_of(func)
    name = getattr(inner, "__name__", type(func).__name__)
    owner = _owner_of(inner)
    _require_plain_self(inner, name)
    scope = _scope_of(inner, owner)
    parameters: dict[str, TSType] = {}
    for i, parameter in enumerate(plain.parameters.values()):
        if i == 0 and inner is func and owner is not None and _takes_self(inner, owner):
            parameters[parameter.name] = nominal_type(owner)
        else:
            parameters[parameter.name] = _parameter_type(parameter, scope, name)
    returns: TSType | None = None
    if isinstance(func, type):
        returns = nominal_type(func)
    elif plain.return_annotation is not _EMPTY:
        returns = from_annotation(plain.return_annotation, scope, where=f"{name}: the result")
    return Signature(name, parameters, returns, plain)


def _parameter_type(parameter: inspect.Parameter, scope: Scope, name: str) -> TSType:
    where = f"{name}: parameter {parameter.name}"
    default = parameter.default
    if parameter.annotation is not _EMPTY:
        type_ = from_annotation(parameter.annotation, scope, where=where)
    elif default is _EMPTY or default is None:
        type_ = TENSOR
    else:
        type_ = nominal_view(of_value(default))
    return optional(type_) if default is None and type_ != NONE else type_


def _takes_self(func: Any, owner: type) -> bool:
    return not isinstance(inspect.getattr_static(owner, func.__name__, None), staticmethod)


def _require_plain_self(func: Any, name: str) -> None:
    *path, _ = getattr(func, "__qualname__", "").split(".")
    if not path or path[-1] == "<locals>":
        return  # not defined in the body of a class
    first = next(iter(inspect.signature(func).parameters.values()), None)
    if first is not None and first.name == "self" and first.annotation is not _EMPTY:
        raise AnnotationError(
            f"{name}: expected self without an annotation, since its type is the class that the "
            f"method is defined in, got {first.annotation!r}"
        )


# --- the attributes of a type


Resolved: TypeAlias = TSAllType | Signature
"""The type of a data attribute, or the signature of a method."""


@folding()
def attribute_type(type_: TSAllType, name: str, *, of: str = "a value") -> Resolved:
    """Return the type of an attribute of the values of a type.

    Args:
        type_: the type.
        name: the attribute; operators have Python's names (``"__add__"``).
        of: the value's name, for error messages.

    Returns:
        The type of a data attribute, or the ``Signature`` of a method. The signature of a method in
        C accepts any arguments.

    Raises:
        TypeCheckError: values of this type lack the attribute, can be None, or have an unknown type
            (``Any``).

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
nothing can be computed with it. Annotate or describe x with a concrete type.

    Source: the check of attribute resolution in the TorchScript type system proposal.
    """
    try:
        return _resolve(type_, name, of)
    except AnnotationError as error:
        raise TypeCheckError(f"{of}.{name}: {error}") from None


def _resolve(type_: TSAllType, name: str, of: str) -> Resolved:
    require_type(type_)
    match type_:
        case TSMetaType():
            raise TypeCheckError(
                f"{of}.{name}: {of} is of type Any, of which nothing is known, so nothing can be "
                f"computed with it. Annotate or describe {of} with a concrete type."
            )
        case TSOptional(element):
            raise TypeCheckError(
                f"{of}.{name}: {of} is of type {type_} and may be None; test `{of} is not None` "
                f"first, after which it is of type {element}."
            )
        case TSNamedTuple(names, elements):
            field_type = dict(zip(names, elements, strict=True)).get(name)
            return _of_class(tuple, type_, name, of) if field_type is None else field_type
        case TSUnion():
            raise TypeCheckError(
                f"{of}.{name}: {of} is of type {type_}, one of several; test which one first."
            )
        case TSFields(cls, names, children):
            declared = dict(zip(names, children, strict=True)).get(name)
            return _of_class(cls, type_, name, of) if declared is None else declared
        case TSFuture(element):
            if name in ("wait", "value"):
                return _signature_of_anything(name, element)
            return _of_class(torch.futures.Future, type_, name, of)
        case TSRRef(element):
            if name not in ("to_here", "local_value"):
                raise _missing_error(type_, name, of)
            return _signature_of_anything(name, element)
        case TSTensor(cls):
            data = _tensor_attribute(name) if hasattr(torch.Tensor, name) else None
            return _of_class(cls, type_, name, of) if data is None else data
        case TSModuleInterface(cls):
            if name not in interface_methods(cls):
                raise _missing_error(type_, name, of)
            return signature(interface_methods(cls)[name])
        case TSModuleType(cls, attributes):
            attribute = dict(attributes).get(name)
            return _of_class(cls, type_, name, of) if attribute is None else attribute
        case TSEnum(cls):
            if name in ("name", "value"):
                return STR if name == "name" else of_value(next(iter(cls)).value)
            return _of_class(cls, type_, name, of)
        case TSType() if type_.value_class is not None:
            return _of_class(type_.value_class, type_, name, of)
        case _:
            raise _missing_error(type_, name, of)


def _missing_error(type_: TSAllType, name: str, of: str) -> TypeCheckError:
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
        raise _missing_error(type_, name, of)
    if isinstance(value, property | functools.cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        return ANY if getter is None else signature(getter).returns or ANY
    if isinstance(value, types.FunctionType):
        return signature(value)
    if callable(value):
        return _signature_of_anything(name)
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


def _signature_of_anything(name: str, returns: TSType | None = None) -> Signature:
    """Return the signature of a method with unknown parameters."""

    def method(*args: Any, **kwargs: Any): ...  # type: ignore[no-untyped-def]

    method.__name__ = name
    return dataclasses.replace(signature(method), returns=returns)


# --- the function inside of a callable, and the names of its annotations


def _function_of(func: Any) -> Any:
    """Return the Python function inside of a wrapper, partial, method, class or instance."""
    func = inspect.unwrap(func)
    if isinstance(func, functools.partial):
        return _function_of(func.func)
    if isinstance(func, types.MethodType):
        return _function_of(func.__func__)
    if isinstance(func, type):
        constructor: Any = vars(func).get("__init__", func.__new__)
        return _function_of(constructor)
    if inspect.isroutine(func):
        return func
    return _function_of(type(func).__call__)


def _owner_of(func: Any) -> type | None:
    """Return the class in whose body a function was defined, if its name leads to it."""
    *path, _ = getattr(func, "__qualname__", "").split(".")
    owner: Any = getattr(func, "__globals__", {})
    # "<locals>" is not found, so a class made inside of a function is not found either.
    for name in path:
        owner = owner.get(name) if isinstance(owner, dict) else vars(owner).get(name)
        if not isinstance(owner, type):
            return None
    return owner if path else None


def _scope_of(func: Any, owner: type | None) -> Scope:
    """Return the objects that the names in a function's annotations refer to."""
    module = sys.modules.get(getattr(func, "__module__", None) or "")
    names = getattr(func, "__globals__", vars(module) if module else {})
    return ChainMap(closure_of(func), dict(class_scope(owner)) if owner else {}, names)
