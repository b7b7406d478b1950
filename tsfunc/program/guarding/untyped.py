"""Which arguments of a call are of type ``Any``: see ``bridge/trace/untyped``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsfunc.bridge.trace.untyped import AnyValue
from tsfunc.types.annotation import says_any
from tsfunc.types.descriptors import (
    Anything,
    Descriptor,
    DictOf,
    FieldsOf,
    InstanceOf,
    ListOf,
    NamedOf,
    Nested,
    OfType,
    OneOf,
    TensorOf,
    TupleOf,
    Value,
)
from tsfunc.types.grammar import assert_never
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.reading import as_descriptor
from tsfunc.types.signatures import annotated_types

StandIn = Callable[[Any], Any]


def any_arguments(
    func: Callable[..., Any],
    described: Mapping[str, Descriptor],
    places: Mapping[int, Sequence[Any]],
    spell: Callable[[Sequence[Any]], str],
) -> dict[int, StandIn]:
    """For each flattened argument of type ``Any`` what makes a stand-in of a value.

    Args:
        func: the function.
        described: parameter name to descriptor, which goes before the annotation.
        places: the path of each flattened argument from a parameter.
        spell: a path as a user would write it.
    """
    annotated = annotated_types(func)
    found: dict[int, StandIn] = {}
    for i, (parameter, *path) in places.items():
        if parameter in described:
            said, by = described[parameter], "descriptor"
        elif parameter in annotated:
            said, by = as_descriptor(annotated[parameter]), "annotation"
        else:
            continue
        if _is_any(said, tuple(path)):
            found[i] = _stand_in(spell(places[i]), _mend(func, parameter, by))
    return found


def _stand_in(text: str, mend: str) -> StandIn:
    return lambda value: None if value is None else AnyValue(value, text, mend)


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
    """Whether a descriptor calls what lies at a path ``Any``, in so many words."""
    match said:
        case Anything():
            return True
        case MetaTensorType() | TensorOf() | OfType() | Value():
            return False
        case InstanceOf(cls):
            return bool(path) and says_any(cls, str(path[0]))
        case OneOf(alternatives):
            return any(_is_any(each, path) for each in alternatives)
        case ListOf(element) | TupleOf(element) | DictOf(item=element):
            return bool(path) and _is_any(element, path[1:])
        case NamedOf(names, children):
            return _is_any_at(tuple(range(len(names))), children, path)
        case Nested(_, entries, children):
            return _is_any_at(entries, children, path)
        case FieldsOf(cls, names, children):
            if not path or str(path[0]) not in names:
                return False
            child = children[names.index(str(path[0]))]
            # Where an annotation is no type, nothing is said of the attribute, not even Any.
            said_so = child != Anything() or says_any(cls, str(path[0]))
            return said_so and _is_any(child, path[1:])
        case _:
            assert_never(said)


def _is_any_at(
    entries: tuple[Any, ...], children: tuple[Descriptor, ...], path: tuple[Any, ...]
) -> bool:
    if not path or path[0] not in entries:
        return False
    return _is_any(children[entries.index(path[0])], path[1:])
