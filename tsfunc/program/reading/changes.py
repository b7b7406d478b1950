"""What a trace has changed outside of itself, and the updates that its program ends with.

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
from tsfunc.program.reading.holding import Held, Place, changed, is_namespace, put_back
from tsfunc.program.reading.updates import NotKept, Update, Updates, Values, replaced, unchanged

MISSING: Any = object()
"""In the place of a value where there is none."""


@dataclass(frozen=True)
class Change:
    """Something that the traced function has assigned.

    Attributes:
        text: how a user would write it.
        place: of what it belongs to.
        owner: what it belongs to.
        target: as an update has it.
        before: what it was, or ``MISSING``.
        after: what it was at the end.
        undo: gives it back what it was.
        line: where it was assigned, if that is known.
        problem: why a program can't do the same, if it can't.
        fills: whether it is a container that has other elements.
        buffer: the name of the module's buffer that was assigned, if it is one.
    """

    text: str
    place: Place
    owner: Any
    target: str
    before: Any
    after: Any
    undo: Callable[[], None]
    line: str | None = None
    problem: str | None = None
    fills: bool = False
    buffer: str | None = None


def changed_containers(held: Held) -> Iterator[Change]:
    """The containers that the function has changed."""
    for each in held.containers:
        if not changed(each):
            continue
        namespace = is_namespace(each.value)
        elements = vars(each.value) if namespace else each.value
        # A copy: it is put back, and the elements are what the program gives it again.
        after = dict(elements) if isinstance(elements, dict) else type(elements)(elements)
        yield Change(
            each.place.text,
            each.place,
            each.value,
            "vars({})" if namespace else "{}",
            each.before,
            after if isinstance(after, dict | set) else list(after),
            undo=functools.partial(put_back, each),
            fills=True,
        )


def updates_of(changes: Sequence[Change], held: Held) -> Updates:
    """The updates that do again what was changed.

    Raises:
        TypeCheckError: a program can't do one of them.
    """
    values = Values(held.again)
    updates: list[Update] = []
    problems: list[str] = []
    for change in changes:
        at = f" at {change.line}" if change.line else ""
        problem = change.problem
        if problem is None and change.place.own and held.closure == "freeze":
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
            held.loosen(tensor)
        number = held.facts_of(change.place.own).result(change.place.variable, change.owner)
        keeps = change.text not in held.read or unchanged(change.before, change.after)
        updates.append(
            Update(
                change.text, number, change.target, kept, change.fills, change.after is MISSING,
                change.buffer, keeps,
            )
        )  # fmt: skip
    if problems:
        raise TypeCheckError(
            f"specialize({held.name}): the function assigns to what lives on after the call, and "
            f"a program can't do that for:\n{''.join(problems)}"
            f"Return the new value instead, or write it into a tensor that is there "
            f"(x.copy_(value))."
        )
    return Updates(tuple(updates), tuple(values.tensors))


def _refuse_escaping(text: str, tensor: Any) -> None:
    """Raises where what is assigned stands for the values of a transform inside of the trace."""
    if isinstance(tensor, Tracer) and not isinstance(tensor, TraceTracer):
        level = tensor.dispatch_level
        raise EscapedTracerError(
            f"{level.name}: {text} is assigned a tensor that stands for values inside of "
            f"{level.name}, which has ended. Return it from the transformed function instead."
        )
