"""Tracers with a record, whose calls are seen first by what the record is for.

A tracer is marked by its class: a subclass of the one that it had, with nothing of its own. Other
tracers' calls so pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsfunc import pytrees
from tsfunc.bridge.tracers.hot_calls import KINDS, MadeTracer, TurnedTracer
from tsfunc.bridge.tracers.tracer import MARKED, NO_KWARGS, door_1, settle


class Record:
    """What is known of a marked tracer."""

    @staticmethod
    def serve(
        func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Door 1 for a call with such tracers among its arguments."""
        raise NotImplementedError

    def settle(self) -> None:
        """Before the tracer is looked at."""
        raise NotImplementedError


# The classes of marked tracers, by those without a mark.
_classes: dict[type, type] = {}


def mark(tracer: Any, record: Record) -> None:
    """Gives a tracer its record."""
    kind = type(tracer)
    marked = _classes.get(kind)
    if marked is None:
        marked = _classes[kind] = _class_for(kind)
        MARKED[marked] = record.serve
    tracer.__class__ = marked
    tracer.record = record


def unmark(tracer: Any) -> Record | None:
    """Makes a tracer what it is without its record, which is returned."""
    record: Record | None = record_of(tracer)
    if record is not None:
        tracer.__class__ = type(tracer).__mro__[1]
        del tracer.record
    return record


def record_of(value: Any) -> Any:
    """The record of a tracer, None of what has none."""
    return value.record if type(value) in MARKED else None


def settle_all(tree: Any) -> None:
    """Settles the tensors of a pytree."""
    for leaf in pytrees.leaves_of(tree):
        settle(leaf)


def _class_for(kind: type) -> type:
    if kind is not MadeTracer:
        return type(kind.__name__, (kind,), {"__slots__": ()})

    def without_hot_rules(
        cls: type,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return door_1(func, types, args, kwargs or NO_KWARGS)

    # Hot calls take it. It is asked before others of its level, being derived from them all.
    members = {"__slots__": (), "__torch_function__": classmethod(without_hot_rules)}
    marked = type(kind.__name__, (MadeTracer, TurnedTracer), members)
    KINDS.add(marked)
    return marked
