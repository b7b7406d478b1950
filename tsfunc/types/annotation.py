"""Annotations: conversion of typing objects, classes and strings to types.

A typing object in a descriptor is read here too: descriptors have all of the language's types, and
literals, unions, and tuples of any length. ``reading`` reads the other descriptors.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
import typing
import weakref
from collections import ChainMap, abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, Union

import optree
import torch

from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.base import TSType
from tsfunc.types.classes import nominal_type
from tsfunc.types.containers import TSDict, TSList, TSNamedTuple, TSTuple, TSTupleOf
from tsfunc.types.grammar import GENERIC
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.single import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    NONE,
    STR,
    TENSOR,
    TSModuleType,
    TSTensor,
    literal,
)
from tsfunc.types.text import compose, read_type
from tsfunc.types.unions import TSUnion
from tsfunc.types.values import describe
from tsfunc.user_code import folding

Scope: TypeAlias = Mapping[str, object]

_CLASSES: dict[object, TSType] = {
    int: INT,
    float: FLOAT,
    bool: BOOL,
    str: STR,
    type(None): NONE,
    None: NONE,
    object: ANY,
    Any: ANY,
    torch.Tensor: TENSOR,
    MetaTensorType: TENSOR,
}
_ADVICE = (
    "a type is Any, int, float, bool, str, None, Tensor, MetaTensorType(...), Tuple[X, Y], "
    "List[X], Dict[K, V], Optional[X], Future[X], RRef[X], a NamedTuple, an Enum, or a class"
)


SUPPORTED = (
    "a MetaTensorType, a class, List[X], Tuple[X, ...], Dict[K, V], Optional[X], Union[X, Y], "
    "Literal[...], Any, a type of tsfunc.types, a container of descriptors, or a value"
)
"""The descriptors that there are, for error messages."""


@dataclass(frozen=True)
class _Reading:
    """The context in which an annotation is read.

    Attributes:
        where: the name of the annotation in error messages.
        scope: the objects that names in strings refer to; None for the words of the grammar only.
        inside: the enclosing named tuples.
        descriptor: reads a part of a descriptor at a path; None for an annotation.
    """

    where: str
    scope: Scope | None
    inside: tuple[type, ...] = ()
    descriptor: Callable[[Any, str], TSType] | None = None

    def error(self, what: str) -> AnnotationError:
        return AnnotationError(f"{self.where}: {what}")

    def unknown_error(self, annotation: object) -> AnnotationError:
        """Return the error of an object that is not a type."""
        if self.descriptor is not None:
            return self.error(f"{annotation!r} can't be checked at a call; give {SUPPORTED}")
        return self.error(f"{annotation!r} is not a type of the language; {_ADVICE}")

    def part(self, annotation: Any, step: str = "") -> TSType:
        """Return the type of a part, which is a step further from ``where``."""
        if self.descriptor is not None:
            return self.descriptor(annotation, self.where + step)
        return _read_annotation(annotation, self)


@folding()
def from_annotation(
    annotation: Any, scope: Scope | None = None, *, where: str = "the annotation"
) -> TSType:
    """Return the type that an annotation stands for.

    Args:
        annotation: a typing object of the old or the new style, a class, a ``MetaTensorType``,
            a string, a forward reference, or a type itself.
        scope: the objects that names in strings refer to, such as the globals of the module.
            Without a scope strings are parsed by ``parse``.
        where: the name of the annotation in error messages.

    Raises:
        AnnotationError: the annotation is not a type of the language.

    Example:
        >>> from typing import Dict, Optional
        >>> print(from_annotation(Dict[str, Optional[torch.Tensor]]))
        Dict[str, Optional[Tensor]]
        >>> print(from_annotation(list[MetaTensorType(["n", 64], dtype=torch.float32)]))
        List[f32[n, 64]]
        >>> print(from_annotation("Tuple[int, List[Node]]", {"Node": torch.nn.Module}))
        Tuple[int, List[torch.nn.Module]]

    Source: the type annotations of the TorchScript type system proposal.
    """
    try:
        return _read_annotation(annotation, _Reading(where, scope))
    except RecursionError:
        raise AnnotationError(f"{where}: nested too deeply for a type") from None


def _read_annotation(annotation: Any, reading: _Reading) -> TSType:
    if isinstance(annotation, TSType):
        return annotation
    if isinstance(annotation, TSModuleType):
        raise reading.error(
            f"expected the class {annotation.cls.__name__}, got the type of one module, which is "
            f"not an annotation"
        )
    if isinstance(annotation, MetaTensorType):
        return TSTensor(meta=annotation)
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _from_string(annotation, reading)
    if typing.get_origin(annotation) is not None:
        return _from_generic(annotation, reading)
    try:
        type_ = _CLASSES.get(annotation)
    except TypeError:  # not hashable
        type_ = None
    if type_ is not None:
        return type_
    if isinstance(annotation, type):
        return _from_class(annotation, reading)
    if isinstance(annotation, typing.NewType):
        return _read_annotation(annotation.__supertype__, reading)
    if type(annotation).__name__ == "TypeAliasType":  # Python 3.12's `type X = ...`
        return _read_annotation(annotation.__value__, reading)
    raise reading.unknown_error(annotation)


def from_typing(annotation: Any, where: str, descriptor: Callable[[Any, str], TSType]) -> TSType:
    """Return the descriptor that a typing object with an origin stands for.

    Args:
        annotation: the typing object, such as ``List[X]``.
        where: the path of the descriptor in error messages.
        descriptor: reads the descriptor of a part at a path.
    """
    return _from_generic(annotation, _Reading(where, None, descriptor=descriptor))


def _from_string(text: str, reading: _Reading) -> TSType:
    if reading.scope is None:
        try:
            return read_type(text, {}, lambda value: _read_annotation(value, reading))
        except AnnotationError as error:
            raise AnnotationError(f"{reading.where}: {error}") from None
    try:
        names: Any = ChainMap(dict(reading.scope), _WORDS)
        value = eval(text, {"__builtins__": builtins}, names)
    except Exception as error:
        # The text can be of the grammar without being Python: f32[n, 64] cpu.
        try:
            return read_type(text, reading.scope, lambda value: _read_annotation(value, reading))
        except AnnotationError:
            refused = reading.error(f"{text!r} can't be read: {error}")
            refused.undefined = isinstance(error, NameError | AttributeError)
            raise refused from None
    return _read_annotation(value, reading)


_WORDS: dict[str, object] = {
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple")},
    "Union": Union,
    "Tensor": torch.Tensor,
    "MetaTensorType": MetaTensorType,
    "Future": torch.futures.Future,
    "torch": torch,
}
"""The grammar's own words, for names in strings that the scope lacks."""


@folding()
def parse(text: str, scope: Scope | None = None) -> TSType:
    """Return the type that a text describes; the inverse of ``str``.

    Args:
        text: a type as returned by ``str``, or as written in Python code.
        scope: the objects that the names of classes in the text refer to. Other names are looked up
            as a module and a qualified name.

    Raises:
        AnnotationError: the text is not a type.

    Example:
        >>> parse("Dict[str, Tuple[int, Tensor]]")
        TSDict(key=TSPrimitiveType(name='str'), value=TSTuple(elements=(TSPrimitiveType(name='int')\
, TSTensor(cls=<class 'torch.Tensor'>, meta=MetaTensorType()))))
        >>> print(parse("list[f32[n, 64] cpu | None]"))
        List[Optional[f32[n, 64] cpu]]

    Source: the grammar of the TorchScript type system proposal.
    """
    return read_type(text, scope or {}, lambda value: from_annotation(value, scope))


# --- typing objects


def _from_generic(annotation: Any, reading: _Reading) -> TSType:
    """Convert a typing object with arguments, or one that lacks them (``List``)."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _from_annotated(args, reading)
    if origin in (typing.Final, typing.ClassVar):
        return reading.part(args[0])
    if args == ((),):  # Tuple[()] on Python 3.10
        args = ()
    if reading.descriptor is not None:
        descriptor = _only_in_descriptors(annotation, args, reading)
        if descriptor is not None:
            return descriptor
    name = _constructor(origin)
    if name is None:
        if isinstance(origin, type) and typing.Generic in origin.__bases__:
            return reading.part(origin)  # the parameters of a user's class are not in the language
        raise reading.unknown_error(annotation)
    if not args and annotation in (typing.List, typing.Dict, typing.Tuple):  # noqa: UP006
        raise reading.error(
            f"{annotation!r} needs the types of its elements: write {GENERIC[name].spelling}"
        )
    if Ellipsis in args:
        raise reading.error(
            f"{annotation!r} can have any length, and the length of a tuple is part of its type; "
            f"write List[X] for any length"
        )
    inner = replace(reading, descriptor=None)
    try:
        return compose(name, [inner.part(arg) for arg in args])
    except AnnotationError as error:
        text = str(error)
        raise error if text.startswith(reading.where) else reading.error(text) from None


def _only_in_descriptors(
    annotation: Any, args: tuple[Any, ...], reading: _Reading
) -> TSType | None:
    """Convert a typing object of a descriptor; None for a future, an RRef, or an unknown one."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        for value in args:
            require_hashable(value, reading.where)
        return TSUnion(tuple(map(literal, args)))
    if origin in (Union, types.UnionType):
        return TSUnion(tuple(map(reading.part, args)))
    if origin in (list, abc.MutableSequence, abc.Sequence):
        element = reading.part(args[0], "[...]") if args else ANY
        many = TSList(element)
        return TSUnion((many, TSTupleOf(element))) if origin is abc.Sequence else many
    if origin in (dict, abc.Mapping, abc.MutableMapping):
        key, item = args or (Any, Any)
        keys = reading.part(key)
        if _has_tensor(keys):
            raise reading.error(f"expected keys of a dict that are not tensors, got {keys}")
        return TSDict(keys, reading.part(item, "[...]"))
    if origin is not tuple:
        return None
    if annotation is typing.Tuple:  # noqa: UP006
        return TSTupleOf(ANY)
    if args[1:] == (Ellipsis,):
        return TSTupleOf(reading.part(args[0], "[...]"))
    if Ellipsis in args:
        raise reading.error(
            f"{annotation!r} can't be checked at a call; a tuple of any length is Tuple[X, ...]"
        )
    return TSTuple(tuple(reading.part(arg, f"[{i}]") for i, arg in enumerate(args)))


def _has_tensor(type_: TSType) -> bool:
    return isinstance(type_, TSTensor) or any(map(_has_tensor, type_.parts))


def require_hashable(value: Any, where: str) -> None:
    """Raise for a literal that can't be hashed, because it may change."""
    try:
        hash(value)
    except TypeError:
        raise DescriptorError(
            f"{where}: {describe(value)} can't be hashed, so it could change after the "
            f"definition; give a hashable value (a frozenset for a set, a tuple for an array), the "
            f"class {type(value).__name__}, or Value(...) to compare the argument with this object"
        ) from None


def _constructor(origin: Any) -> str | None:
    """Return the grammar's name of a typing object's origin, or None."""
    if origin in (Union, types.UnionType):
        return "Union"
    if not isinstance(origin, type):
        return None
    return next((word for word, cls in GENERIC.items() if cls.has_origin(origin)), None)


def _from_annotated(args: tuple[Any, ...], reading: _Reading) -> TSType:
    """Convert ``Annotated[Tensor, MetaTensorType(...)]``, a tensor with metadata."""
    base = reading.part(args[0])
    for extra in args[1:]:
        if isinstance(extra, MetaTensorType):
            if not isinstance(base, TSTensor):
                raise reading.error(f"{extra!r} describes a tensor, but annotates {base}")
            base = TSTensor(base.cls, extra)
    return base


# --- classes


def _from_class(cls: type, reading: _Reading) -> TSType:
    word = _constructor(cls)
    if word is not None:
        spelling = GENERIC[word].spelling
        raise reading.error(f"{cls.__name__} needs the types of its elements: write {spelling}")
    if optree.is_namedtuple_class(cls):
        return _from_named_tuple(cls, reading)
    if optree.is_structseq_class(cls):  # torch.return_types
        fields = tuple(optree.structseq_fields(cls))
        return TSNamedTuple(fields, (TENSOR,) * len(fields))
    if typing.is_typeddict(cls):
        raise reading.error(f"{cls.__name__} is a TypedDict, which no dict can be told to be")
    try:
        return nominal_type(cls)
    except AnnotationError as error:
        raise AnnotationError(f"{reading.where}: {error}") from None


def _from_named_tuple(cls: type, reading: _Reading) -> TSType:
    """Convert a named tuple class.

    A field without annotation is a tensor, like a parameter without annotation.
    """
    if cls in reading.inside:
        raise reading.error(
            f"{cls.__name__} has itself among its elements; the type of a named tuple consists of "
            f"the types of its elements, so it would have no end; make it a class"
        )
    names = optree.namedtuple_fields(cls)
    inner = replace(reading, inside=(*reading.inside, cls))
    annotations = dict(raw_annotations(cls))
    elements = []
    for name in names:
        where = f"{reading.where}: {cls.__name__}.{name}"
        scope = class_scope(cls)
        elements.append(
            _read_annotation(
                annotations.get(name, TENSOR), replace(inner, where=where, scope=scope)
            )
        )
    return TSNamedTuple(names, tuple(elements))


def raw_annotations(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the unevaluated annotations of a class and its bases."""
    for home in reversed(cls.__mro__):
        yield from inspect.get_annotations(home).items()


def class_scope(cls: type) -> Scope:
    """Return the objects that the names in the annotations of a class refer to."""
    module = sys.modules.get(cls.__module__)
    return ChainMap({cls.__name__: cls}, _closed_over(cls), vars(module) if module else {})


def _closed_over(cls: type) -> dict[str, object]:
    """Return the variables of an enclosing function that the methods of a class close over."""
    variables: dict[str, object] = {}
    for method in vars(cls).values():
        if isinstance(method, types.FunctionType):
            variables.update(closure_of(method))
    return variables


def closure_of(func: Any) -> dict[str, object]:
    """Return the variables with a value that a function closes over."""
    variables: dict[str, object] = {}
    names = getattr(getattr(func, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(func, "__closure__", None) or (), strict=False):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return variables


_known: weakref.WeakKeyDictionary[type, Mapping[str, TSType]] = weakref.WeakKeyDictionary()


def attribute_types(cls: type) -> Mapping[str, TSType]:
    """Return the types of a class's annotated attributes; ``Any`` if the annotation is not a type.

    An attribute is checked at its use, so an annotation that is not a type of the language does not
    prevent the use of other attributes.
    """
    if cls in _known:
        return _known[cls]
    types_: dict[str, TSType] = {}
    clear, scope = True, class_scope(cls)
    for home in reversed(cls.__mro__):
        names = ChainMap(dict(class_scope(home)), dict(scope))
        for name, annotation in inspect.get_annotations(home).items():
            try:
                types_[name] = from_annotation(annotation, names, where=f"{cls.__name__}.{name}")
            except AnnotationError as error:
                types_[name] = ANY
                clear = clear and not error.undefined
    if clear:
        _known[cls] = types_
    return types_
