"""Tracers with a record, whose calls go to the record's ``serve`` first.

The mark of a tracer is its class: an empty subclass of the tracer's previous class. Calls without
marked tracers therefore pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsfunc import pytrees
from tsfunc.bridge.tracers.hot_calls import KINDS, MadeTracer, PromotedTracer
from tsfunc.bridge.tracers.tracer import MARKED, NO_KWARGS, door_1, settle


class Record:
    """The data attached to a marked tracer."""

    @staticmethod
    def serve(
        func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Door 1 for a call with marked tracers among its arguments."""
        raise NotImplementedError

    def settle(self) -> None:
        """Update the tracer before its values are read."""
        raise NotImplementedError


# The class of marked tracers, by the unmarked class.
_classes: dict[type, type] = {}


def mark(tracer: Any, record: Record) -> None:
    """Attach a record to a tracer."""
    kind = type(tracer)
    marked = _classes.get(kind)
    if marked is None:
        marked = _classes[kind] = _class_for(kind)
        MARKED[marked] = record.serve
    tracer.__class__ = marked
    tracer.record = record


def unmark(tracer: Any) -> Record | None:
    """Detach and return the record of a tracer, if any."""
    record: Record | None = record_of(tracer)
    if record is not None:
        tracer.__class__ = type(tracer).__mro__[1]
        del tracer.record
    return record


def record_of(value: Any) -> Any:
    """Return the record of a tracer, or None."""
    return value.record if type(value) in MARKED else None


def settle_all(tree: Any) -> None:
    """Settle the tensors of a pytree."""
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

    # Hot calls accept a MadeTracer. As a subclass of all tracer classes of its level, the marked
    # class has its ``__torch_function__`` called before theirs.
    members = {"__slots__": (), "__torch_function__": classmethod(without_hot_rules)}
    marked = type(kind.__name__, (MadeTracer, PromotedTracer), members)
    KINDS.add(marked)
    return marked
