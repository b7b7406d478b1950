"""The check of values against types: every mismatch, with its path."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.annotation import attribute_types, class_scope, from_annotation
from tsfunc.types.base import TSAllType, TSType
from tsfunc.types.check_codegen import Fits, generate_type_check, never
from tsfunc.types.check_context import CheckContext, Mismatch
from tsfunc.types.classes import interface_methods
from tsfunc.types.dims import Dim, DimForm
from tsfunc.types.inference import module_type
from tsfunc.types.lattice import is_subtype
from tsfunc.types.single import TSCustomClass, TSModuleType
from tsfunc.types.sizes import DimExpr
from tsfunc.types.values import Path
from tsfunc.user_code import folding


@folding()
def check(value: Any, type_: TSAllType | Any, name: str = "x") -> list[Mismatch]:
    """Return every mismatch between a value and a type; an empty list if the value fits.

    Sizes of one name are equal within the whole type.

    Args:
        value: any value.
        type_: a type, or an annotation (see ``from_annotation``).
        name: the value's name in the paths.

    Raises:
        AnnotationError: ``type_`` is not a type.

    Example:
        >>> from tsfunc.types import parse
        >>> weights = parse("Dict[str, List[f32[n, 64]]]")
        >>> for mismatch in check({"w": [torch.ones(10), torch.ones(3, 64)], "b": 1}, weights):
        ...     print(mismatch)
        x['w'][0].shape: expected [n, 64], got [10]
        x['b']: expected a list, got 1 (int)

    Source: the checks of parameter binding and assignment in the TorchScript type system proposal.
    """
    if not isinstance(type_, TSModuleType):
        type_ = from_annotation(type_)
    return [] if predicate(type_)(value) else mismatches([(name, value, type_)])


@functools.lru_cache(maxsize=4096)
def predicate(type_: TSAllType) -> Fits:
    """Return a function that returns True only for values of a type; it can miss some of them."""
    return never if leaves_names_open(type_) else generate_type_check(type_, decide)


def decide(type_: TSAllType) -> Fits:
    """Return a function that returns True exactly for the values of a type."""
    return lambda value: not mismatches([("x", value, type_)])


def mismatches(values: Iterable[tuple[str, Any, TSAllType]]) -> list[Mismatch]:
    """Return the mismatches of named values; sizes of one name are equal in all of them."""
    roots = list(values)
    context = TypeCheck({name: value for name, value, _ in roots})
    for name, value, type_ in roots:
        type_.check(value, (name,), context)
    return context.finish()


class TypeCheck(CheckContext):
    """A check that reads the annotations of classes."""

    __slots__ = ()

    def types_of_fields(self, value: Any, cls: type) -> Mapping[str, TSType]:
        types = attribute_types(cls)
        names = [field.name for field in dataclasses.fields(cls) if hasattr(value, field.name)]
        return {name: types[name] for name in names}

    def methods(self, value: Any, interface: type, path: Path) -> None:
        for name, (expected, got) in missing_methods(type(value), interface):
            self.fail(path, f".{name}", expected, got)

    def attributes_of_module(self, module: torch.nn.Module) -> dict[str, TSAllType]:
        return dict(module_type(module).attributes)


def leaves_names_open(type_: TSAllType) -> bool:
    """True if generated code can't compare the named sizes of a type.

    The code reads sizes in order. A computed size can come before its names, and the functions of
    ``decide`` do not return the sizes that they have read.
    """
    return any(
        isinstance(dim, DimExpr) or (behind and isinstance(dim, Dim))
        for dim, behind in _sizes_in_type(type_, ())
    )


def _sizes_in_type(type_: TSAllType, behind: tuple[type, ...]) -> Iterator[tuple[DimForm, bool]]:
    """Yield the sizes in a type, and True for sizes behind a type that needs ``decide``.

    ``behind`` are the enclosing classes, so that a class with itself as an attribute comes once.
    """
    if not isinstance(type_, TSType):
        return
    if isinstance(type_, TSCustomClass):
        cls = type_.cls
        if dataclasses.is_dataclass(cls) and cls not in behind:
            for part in attribute_types(cls).values():
                yield from _sizes_in_type(part, (*behind, cls))
        return
    if not type_.parts:
        for dim in type_.dims:
            yield dim, bool(behind)
    for part in type_.parts:
        yield from _sizes_in_type(part, behind if type_.closed else (*behind, type(type_)))


# --- interfaces


def missing_methods(cls: type, interface: type) -> list[tuple[str, tuple[str, str]]]:
    """Return the methods of an interface that a class lacks or has with other types.

    A class that is derived from the interface has its methods. Another class must have each method
    under its name, accept the arguments of the interface, and return a subtype of its result.
    """
    differences = []
    for name, declared in interface_methods(interface).items():
        member = inspect.getattr_static(cls, name, None)
        expected = f"a method {name}{inspect.signature(declared)}"
        if not callable(member) or member is declared:
            differences.append((name, (expected, f"none in {cls.__name__}")))
        elif not _accepts(cls, member, interface, declared):
            got = f"{name}{inspect.signature(member)} of {cls.__name__}"
            differences.append((name, (expected, got)))
    return differences


def _accepts(cls: type, member: Any, interface: type, declared: Any) -> bool:
    ours, theirs = inspect.signature(member), inspect.signature(declared)
    arguments = list(theirs.parameters.values())[1:]
    positional = [p for p in arguments if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: p for p in arguments if p.kind is p.KEYWORD_ONLY}
    try:
        bound = ours.bind(None, *positional, **named).arguments
    except TypeError:
        return False
    pairs = [
        (parameter.annotation, ours.parameters[name].annotation)
        for name, parameter in list(bound.items())[1:]
        if isinstance(parameter, inspect.Parameter)
    ]
    returns = (ours.return_annotation, theirs.return_annotation)
    scopes = class_scope(interface), class_scope(cls)
    return all(_is_below(one, other, *scopes) for one, other in pairs) and _is_below(
        *returns, *reversed(scopes)
    )


def _is_below(one: Any, other: Any, one_scope: Any, other_scope: Any) -> bool:
    """True if an annotation is a subtype of another, or one of them is missing."""
    if inspect.Parameter.empty in (one, other):
        return True
    try:
        return is_subtype(from_annotation(one, one_scope), from_annotation(other, other_scope))
    except AnnotationError:
        return True
