"""The types of values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tsfunc.errors import TypeCheckError
from tsfunc.types.base import TSAllType, TSType
from tsfunc.types.classes import BUILTIN_CLASSES, nominal_or_custom
from tsfunc.types.containers import TSDict, TSList, TSNamedTuple, TSTuple, is_key_type
from tsfunc.types.futures import TSFuture, TSRRef
from tsfunc.types.lattice import join_parts
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.single import (
    ANY,
    NONE,
    STR,
    TENSOR,
    TSBuiltinClass,
    TSCustomClass,
    TSModuleType,
    TSTensor,
    primitive_of,
)
from tsfunc.types.unions import optional
from tsfunc.types.values import field_names
from tsfunc.user_code import folding

_DESCRIBED: TypeAlias = Callable[[torch.Tensor], TSType]


@folding()
def of_value(value: Any, *, describe: bool = False) -> TSAllType:
    """Return the type of a value.

    Args:
        value: any value. A tensor of any class is a ``Tensor``. A list or dict has the common type
            of its elements, which are tensors if it is empty. A module has a separate type, a
            ``TSModuleType``. The type of any other object is its class.
        describe: True to describe tensors in full, including their sizes.

    Raises:
        TypeCheckError: a container contains itself.

    Example:
        >>> print(of_value({"a": [1, None], "b": []}))
        Dict[str, List[Optional[int]]]
        >>> print(of_value((torch.ones(2, 3), "sum"), describe=True))
        Tuple[f32[2, 3] cpu no_grad strided, str]

    Source: the inference of types in the TorchScript type system proposal.
    """
    try:
        if isinstance(value, torch.nn.Module) and type(value) not in BUILTIN_CLASSES:
            return _module_type(value, ())
        return _common_type(
            [value], lambda x: TSTensor(meta=MetaTensorType.of(x)) if describe else TENSOR
        )
    except RecursionError:
        raise TypeCheckError(
            f"a {type(value).__name__} that contains itself, or is nested too deeply, has no type"
        ) from None


def _common_type(values: Sequence[Any], tensor: _DESCRIBED) -> TSType:
    """Return the common type of several values at the same path.

    The elements of containers are collected before they are joined. In ``[[1], [None], []]`` all
    inner lists together have the elements 1 and None, so they are lists of Optional[int].
    """
    rest = [value for value in values if value is not None]
    if len(rest) < len(values):
        return optional(_common_type(rest, tensor)) if rest else NONE
    if all(isinstance(value, list) for value in rest):
        return TSList(_element_type([item for value in rest for item in value], tensor, TENSOR))
    if all(isinstance(value, dict) for value in rest):
        key = _element_type([key for value in rest for key in value], tensor, STR)
        items = [item for value in rest for item in value.values()]
        return TSDict(key if is_key_type(key) else ANY, _element_type(items, tensor, TENSOR))
    if all(is_tuple(value) for value in rest) and len({len(value) for value in rest}) == 1:
        columns = tuple(_common_type(column, tensor) for column in zip(*rest, strict=True))
        names, *others = {field_names(value) for value in rest}
        return TSTuple(columns) if others or names is None else TSNamedTuple(names, columns)
    return functools.reduce(join_parts, dict.fromkeys(_single(value, tensor) for value in rest))


def _element_type(values: Sequence[Any], tensor: _DESCRIBED, default: TSType) -> TSType:
    return _common_type(values, tensor) if values else default


def is_tuple(value: object) -> bool:
    """True if a value is a tuple of the language; ``torch.Size`` is a separate class."""
    return isinstance(value, tuple) and type(value) not in BUILTIN_CLASSES


def _single(value: Any, tensor: _DESCRIBED) -> TSType:
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, list | dict) or is_tuple(value):
        return _common_type([value], tensor)
    if isinstance(value, torch.futures.Future):
        return TSFuture(_held(value, tensor))
    cls = type(value)
    if TSRRef.has_origin(cls):
        return TSRRef(_common_type([value.local_value()], tensor) if value.is_owner() else ANY)
    primitive = primitive_of(value)
    if primitive is not None:
        return primitive
    builtin = next((base for base in cls.__mro__ if base in BUILTIN_CLASSES), None)
    if builtin is not None and not isinstance(value, torch.nn.Module):
        return TSBuiltinClass(builtin)
    return nominal_or_custom(cls)


def _held(future: Any, tensor: _DESCRIBED) -> TSType:
    """Return the type of a future's value; ``Any`` if the future is not done."""
    if not future.done():
        return ANY
    try:
        return _common_type([future.value()], tensor)
    except Exception:  # it holds an exception of any class
        return ANY


# --- schemas of instances


def module_type(module: torch.nn.Module) -> TSModuleType:
    """Return the type of one module: its class, and the types of its attributes.

    Example:
        >>> print(module_type(torch.nn.Flatten()))
        torch.nn.modules.flatten.Flatten(training: bool, start_dim: int, end_dim: int)
    """
    return _module_type(module, ())


def _module_type(module: torch.nn.Module, inside: tuple[object, ...]) -> TSModuleType:
    return TSModuleType(type(module), tuple(_schema(module, inside).items()))


@folding()
def schema_of(instance: Any) -> dict[str, TSAllType]:
    """Return the types of the attributes of an instance.

    For a module these are its parameters, buffers, submodules and attributes assigned by the user,
    without torch's internal ones. ``__slots__`` are attributes too.

    Example:
        >>> from types import SimpleNamespace
        >>> {name: str(type_) for name, type_ in schema_of(SimpleNamespace(n=3, on=None)).items()}
        {'n': 'int', 'on': 'None'}
    """
    return _schema(instance, ())


def _schema(instance: Any, inside: tuple[object, ...]) -> dict[str, TSAllType]:
    """Return ``schema_of`` an instance.

    Objects in ``inside``, which contain the instance, are described only by their class.
    """
    inside = (*inside, instance)
    types_: dict[str, TSAllType] = {}
    for name, value in instance_attributes(instance).items():
        if any(value is each for each in inside):
            types_[name] = TSCustomClass(type(value))
        elif isinstance(value, torch.nn.Module) and type(value) not in BUILTIN_CLASSES:
            types_[name] = _module_type(value, inside)
        else:
            types_[name] = of_value(value)
    return types_


STATE = ("_parameters", "_buffers", "_modules")
_OWN_TO_MODULES = frozenset(vars(torch.nn.Module()))


def instance_attributes(instance: Any) -> dict[str, Any]:
    """Return the attributes of an instance by name, including the state of a module."""
    attributes = dict(getattr(instance, "__dict__", {}))
    for cls in type(instance).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(instance, name):
                attributes.setdefault(name, getattr(instance, name))
    if not isinstance(instance, torch.nn.Module):
        return attributes
    own_attributes = {
        k: v for k, v in attributes.items() if k == "training" or k not in _OWN_TO_MODULES
    }
    for kind in STATE:
        own_attributes.update(attributes.get(kind, {}))
    return own_attributes
