"""Interfaces: the methods that a class lacks or has with other types."""

from __future__ import annotations

import inspect
from typing import Any

from tsfunc.errors import AnnotationError
from tsfunc.types.annotation import class_scope, from_annotation
from tsfunc.types.classes import interface_methods
from tsfunc.types.lattice import is_subtype


def missing_methods(cls: type, interface: type) -> list[tuple[str, tuple[str, str]]]:
    """Return the methods of an interface that a class lacks or has with other types.

    A class that is derived from the interface has its methods. Another class must have each method
    under its name, accept the arguments of the interface, and return a subtype of its result.
    """
    found = []
    for name, wanted in interface_methods(interface).items():
        own = inspect.getattr_static(cls, name, None)
        expected = f"a method {name}{inspect.signature(wanted)}"
        if not callable(own) or own is wanted:
            found.append((name, (expected, f"none in {cls.__name__}")))
        elif not _accepts(cls, own, interface, wanted):
            got = f"{name}{inspect.signature(own)} of {cls.__name__}"
            found.append((name, (expected, got)))
    return found


def _accepts(cls: type, own: Any, interface: type, wanted: Any) -> bool:
    ours, theirs = inspect.signature(own), inspect.signature(wanted)
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
    return all(_below(one, other, *scopes) for one, other in pairs) and _below(
        *returns, *reversed(scopes)
    )


def _below(one: Any, other: Any, one_scope: Any, other_scope: Any) -> bool:
    """Return True if an annotation is a subtype of another, or one of them is missing."""
    if inspect.Parameter.empty in (one, other):
        return True
    try:
        return is_subtype(from_annotation(one, one_scope), from_annotation(other, other_scope))
    except AnnotationError:
        return True
