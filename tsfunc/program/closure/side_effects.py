"""Changes that a trace has made outside of itself, and the updates that its program ends with.

See NOTE [updates] in ``updates.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tsfunc.bridge.trace.tracing import TraceTracer
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import EscapedTracerError, TypeCheckError
from tsfunc.program.closure.guard_builder import (
    GuardBuilder,
    Source,
    changed,
    is_namespace,
    put_back,
)
from tsfunc.program.closure.updates import (
    NotKept,
    Update,
    Updates,
    UpdateValues,
    replaced,
    unchanged,
)

MISSING: Any = object()
"""Stands for a value that does not exist."""


@dataclass(frozen=True)
class SideEffect:
    """An assignment of the traced function.

    Attributes:
        text: the user's spelling of the target.
        place: the place of the owner.
        owner: the object that the target belongs to.
        target: the Python expression of the target, as in ``Update``.
        before: the value before the trace, or ``MISSING``.
        after: the value at the end of the trace, or ``MISSING``.
        undo: restores the old value.
        line: the line of the assignment, if it is known.
        problem: the reason why a program can't repeat the assignment, if it can't.
        fills: whether the target is a container with new elements.
        buffer: the name of the module's buffer that was assigned, if it is a buffer.
    """

    text: str
    source: Source
    owner: Any
    target: str
    before: Any
    after: Any
    undo: Callable[[], None]
    line: str | None = None
    problem: str | None = None
    fills: bool = False
    buffer: str | None = None


def changed_containers(builder: GuardBuilder) -> Iterator[SideEffect]:
    """Yield the changes of containers whose elements the function has changed."""
    for each in builder.containers:
        if not changed(each, builder.numbers):
            continue
        namespace = is_namespace(each.value)
        elements = vars(each.value) if namespace else each.value
        # A copy, since `undo` restores the container itself.
        after = dict(elements) if isinstance(elements, dict) else type(elements)(elements)
        yield SideEffect(
            each.source.text,
            each.source,
            each.value,
            "vars({})" if namespace else "{}",
            each.before,
            after if isinstance(after, dict | set) else list(after),
            undo=functools.partial(put_back, each),
            fills=True,
        )


def updates_of(changes: Sequence[SideEffect], builder: GuardBuilder) -> Updates:
    """Return the updates that repeat the changes.

    Raises:
        TypeCheckError: a program can't repeat one of the changes.
    """
    values = UpdateValues(builder.placeholder_of)
    updates: list[Update] = []
    problems: list[str] = []
    for change in changes:
        at = f" at {change.line}" if change.line else ""
        problem = change.problem
        if problem is None and change.source.own and builder.closure == "freeze":
            problem = 'is burnt in by closure="freeze"'
        kept = None
        if problem is None and change.after is not MISSING:
            try:
                kept = values.kept(change.after)
            except NotKept as error:
                problem = f"gets {error}"
            for tensor in values.tensors:
                _refuse_escaping(change.text, tensor)
        if problem is not None:
            problems.append(f"  {change.text}{at}: it {problem}.\n")
            continue
        for tensor in replaced(change.before, change.after):
            builder.loosen(tensor)
        number = builder.lines_of(change.source.own).result(change.source.variable, change.owner)
        keeps = change.text not in builder.read or unchanged(change.before, change.after)
        updates.append(
            Update(
                change.text, number, change.target, kept, change.fills, change.after is MISSING,
                change.buffer, keeps,
            )
        )  # fmt: skip
    if problems:
        raise TypeCheckError(
            f"specialize({builder.name}): the function assigns to what lives on after the call, "
            f"and a program can't do that for:\n{''.join(problems)}"
            f"Return the new value instead, or write it into a tensor that is there "
            f"(x.copy_(value)). Where only the first call assigns, to set something up, call the "
            f"function once before it is specialized."
        )
    return Updates(tuple(updates), tuple(values.tensors))


def _refuse_escaping(text: str, tensor: Any) -> None:
    """Raise an error if an assigned tensor is a tracer of a transform inside of the trace."""
    if isinstance(tensor, Tracer) and not isinstance(tensor, TraceTracer):
        level = tensor.dispatch_level
        raise EscapedTracerError(
            f"{level.name}: {text} is assigned a tensor that stands for values inside of "
            f"{level.name}, which has ended. Return it from the transformed function instead."
        )
