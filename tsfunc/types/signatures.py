"""Signatures: the types of a function's parameters and of its result."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.annotation import Scope, class_scope, closure_of, from_annotation
from tsfunc.types.checker import Mismatch, decide, mismatches
from tsfunc.types.classes import nominal_type
from tsfunc.types.codegen import generate_call
from tsfunc.types.grammar import (
    NONE,
    TENSOR,
    TSModuleType,
    TSType,
    optional,
)
from tsfunc.types.inference import of_value

_EMPTY = inspect.Parameter.empty
_OURS = __name__.partition(".")[0]
_ONE, _MANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True, eq=False)
class Signature:
    """The types of a function's parameters and of its result; `signature` makes it.

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
        return generate_call(self.name, self._signature, self.parameters, decide)

    def check(self, *args: Any, **kwargs: Any) -> list[Mismatch]:
        """Return every place where an argument of a call does not have its parameter's type.

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


def signature(func: Any) -> Signature:
    """Return the types of a function's parameters and of its result.

    A parameter has the type of its annotation. Without an annotation, it has the type of its
    default value (an optional tensor for None). Without either it is a Tensor. If the default is
    None, None is allowed regardless of the annotation. `self` has the type of its class and must
    not be annotated.

    Args:
        func: a function, a method, a ``functools.partial``, a module, a class, or another
            callable.

    Raises:
        AnnotationError: an annotation is not a type, or `self` has one.

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
    inner = _function(func)
    name = getattr(inner, "__name__", type(func).__name__)
    owner = _owner(inner)
    _require_plain_self(inner, name)
    scope = _scope(inner, owner)
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
        returns = from_annotation(plain.return_annotation, scope, where=f"{name}: what it returns")
    return Signature(name, parameters, returns, plain)


def _parameter_type(parameter: inspect.Parameter, scope: Scope, name: str) -> TSType:
    where = f"{name}: parameter {parameter.name}"
    default = parameter.default
    if parameter.annotation is not _EMPTY:
        type_ = from_annotation(parameter.annotation, scope, where=where)
    elif default is _EMPTY or default is None:
        type_ = TENSOR
    else:
        found = of_value(default)
        type_ = nominal_type(found.cls) if isinstance(found, TSModuleType) else found
    return optional(type_) if default is None and type_ != NONE else type_


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or module; a function in C accepts any arguments."""
    try:
        return inspect.signature(func.forward if isinstance(func, torch.nn.Module) else func)
    except ValueError:
        return inspect.signature(_takes_anything)


def takes_any_keyword(func: Callable[..., Any]) -> bool:
    """Return True if a function has ``**kwargs``, and therefore sees their order.

    The signature of a wrapped function does not count.
    """
    try:
        own = func.forward if isinstance(func, torch.nn.Module) else func
        parameters = inspect.signature(own, follow_wrapped=False).parameters.values()
    except ValueError:
        return True
    return any(parameter.kind is _MANY for parameter in parameters)


def _takes_anything(*args: Any, **kwargs: Any) -> None: ...


def annotated_types(func: Any) -> dict[str, TSType]:
    """Return the types of a function's parameters whose annotation is a type.

    ``*args`` and ``**kwargs`` are left out, because functions that pass arguments on annotate them
    with ``Any``. Functions of this library are left out too, because they accept any pytree.
    """
    target = func.forward if isinstance(func, torch.nn.Module) else func
    inner = _function(target)
    if (getattr(inner, "__module__", None) or "").partition(".")[0] == _OURS:
        return {}
    scope = _scope(inner, _owner(inner))
    found: dict[str, TSType] = {}
    for name, parameter in signature_of(target).parameters.items():
        if parameter.annotation is _EMPTY or parameter.kind in (_ONE, _MANY):
            continue
        try:
            found[name] = from_annotation(parameter.annotation, scope)
        except AnnotationError:  # the annotation is not a type of the language
            continue
    return found


# --- where a function comes from


def _function(func: Any) -> Any:
    """Return the Python function inside of a wrapper, partial, method, class or instance."""
    func = inspect.unwrap(func)
    if isinstance(func, functools.partial):
        return _function(func.func)
    if isinstance(func, MethodType):
        return _function(func.__func__)
    if isinstance(func, type):
        constructor: Any = vars(func).get("__init__", func.__new__)
        return _function(constructor)
    if inspect.isroutine(func):
        return func
    return _function(type(func).__call__)


def _owner(func: Any) -> type | None:
    """Return the class in whose body a function was defined, if its name leads to it."""
    *path, _ = getattr(func, "__qualname__", "").split(".")
    found: Any = getattr(func, "__globals__", {})
    # "<locals>" is not found, so a class made inside of a function is not found either.
    for name in path:
        found = found.get(name) if isinstance(found, dict) else vars(found).get(name)
        if not isinstance(found, type):
            return None
    return found if path else None


def _takes_self(func: Any, owner: type) -> bool:
    return not isinstance(inspect.getattr_static(owner, func.__name__, None), staticmethod)


def _require_plain_self(func: Any, name: str) -> None:
    *path, _ = getattr(func, "__qualname__", "").split(".")
    if not path or path[-1] == "<locals>":
        return  # not defined in the body of a class
    first = next(iter(inspect.signature(func).parameters.values()), None)
    if first is not None and first.name == "self" and first.annotation is not _EMPTY:
        raise AnnotationError(
            f"{name}: self may not be annotated, because its type is the class that the method is "
            f"defined in; got {first.annotation!r}"
        )


def _scope(func: Any, owner: type | None) -> Scope:
    """Return the objects that the names in a function's annotations refer to."""
    module = sys.modules.get(getattr(func, "__module__", None) or "")
    names = getattr(func, "__globals__", vars(module) if module else {})
    return ChainMap(closure_of(func), dict(class_scope(owner)) if owner else {}, names)
