"""Arguments of type ``Any``, which a trace gets as stand-ins: see ``bridge/trace/opaque``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree

from tsfunc import pytrees
from tsfunc.bridge.trace.opaque import OpaqueValue
from tsfunc.types.annotation import says_any
from tsfunc.types.descriptors import child_at
from tsfunc.types.grammar import (
    ANY,
    Descriptor,
    TSCustomClass,
    TSDict,
    TSFields,
    TSList,
    TSMetaType,
    TSNamedTuple,
    TSPytree,
    TSTuple,
    TSTupleOf,
    TSUnion,
)
from tsfunc.types.reading import as_descriptor
from tsfunc.types.signatures import annotated_types

Hide = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""A function of positional and keyword arguments that hides those of type ``Any``."""


def opaque_arguments(
    func: Callable[..., Any],
    described: Mapping[str, Descriptor],
    signature: inspect.Signature,
    spell: Callable[[Sequence[Any]], str],
) -> Hide:
    """Return a function that replaces each value of type ``Any`` by an opaque value.

    A container of type ``Any`` gets one opaque value, so that it can't be iterated or measured.

    Args:
        func: the function that is traced.
        described: parameter name to descriptor, which takes precedence over the annotation.
        signature: the parameters of `func`.
        spell: returns a path in the user's spelling.
    """
    annotated = annotated_types(func)

    def hide(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def hidden(parameter: str, value: Any, *path: Any) -> Any:
            if parameter in described:
                said, by = described[parameter], "descriptor"
            elif parameter in annotated:
                said, by = as_descriptor(annotated[parameter]), "annotation"
            else:
                return value
            mend = _mend(func, parameter, by)
            return _hidden(said, value, path, lambda at: (spell((parameter, *at)), mend))

        positions = signature.bind(*range(len(args)), **{name: name for name in kwargs}).arguments
        new_args, new_kwargs = list(args), dict(kwargs)
        for parameter, at in positions.items():
            # A starred parameter gathers positions in a tuple, or names in a dict.
            if isinstance(at, tuple):
                for i, each in enumerate(at):
                    new_args[each] = hidden(parameter, args[each], i)
            elif isinstance(at, dict):
                for name in at:
                    new_kwargs[name] = hidden(parameter, kwargs[name], name)
            elif isinstance(at, int):
                new_args[at] = hidden(parameter, args[at])
            else:
                new_kwargs[at] = hidden(parameter, kwargs[at])
        return tuple(new_args), new_kwargs

    return hide


def _hidden(
    said: Descriptor,
    value: Any,
    path: tuple[Any, ...],
    words: Callable[[tuple[Any, ...]], tuple[str, str]],
) -> Any:
    """Return the value at a path with each part of type ``Any`` replaced by an opaque value."""
    if value is None:
        return None
    if _is_any(said, path):
        return OpaqueValue(value, *words(path))
    if optree.tree_is_leaf(value, none_is_leaf=True, namespace=pytrees.NAMESPACE):
        return value
    node = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    children = [
        _hidden(said, child, (*path, entry), words)
        for entry, child in zip(node.entries, node.children, strict=True)
    ]
    unchanged = all(one is other for one, other in zip(children, node.children, strict=True))
    return value if unchanged else node.unflatten_func(node.metadata, children)


def _mend(func: Callable[..., Any], parameter: str, by: str) -> str:
    code = getattr(inspect.unwrap(func), "__code__", None)
    at = f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    if by == "descriptor":
        return f"Its descriptor says so: describe {parameter!r} with a concrete type."
    return (
        f"The annotation of {parameter!r}{at} says so: annotate it with a concrete type, or "
        f"describe it with one, which goes before the annotation."
    )


def _is_any(said: Descriptor, path: tuple[Any, ...]) -> bool:
    """Return True if a descriptor has type ``Any`` for the value at a path."""
    match said:
        case TSMetaType():
            return True
        case TSFields(cls, names=()) | TSCustomClass(cls):
            return bool(path) and says_any(cls, str(path[0]))
        case TSUnion(alternatives):
            return any(_is_any(each, path) for each in alternatives)
        case TSList(element) | TSTupleOf(element) | TSDict(value=element):
            return bool(path) and _is_any(element, path[1:])
        case TSNamedTuple() | TSTuple() | TSPytree() | TSFields():
            child = child_at(said, path)
            if child is None:
                return False
            if child == ANY and isinstance(said, TSFields) and not says_any(said.cls, str(path[0])):
                return False  # the annotation is not a type, so it does not mean Any
            return _is_any(child, path[1:])
        case _:
            return False
