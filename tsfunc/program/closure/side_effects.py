"""Side effects of a traced function on variables, containers and objects.

See NOTE [updates] in ``results.py``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tsfunc.bridge.trace.tracing import TraceTracer
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import EscapedTracerError, TypeCheckError
from tsfunc.program.closure.guard_builder import (
    GuardBuilder,
    changed,
    is_namespace,
    put_back,
)
from tsfunc.program.closure.packages import is_installed, is_library
from tsfunc.program.closure.read_guards import Source
from tsfunc.program.closure.results import (
    NotKept,
    Update,
    Updates,
    UpdateValues,
    replaced,
    unchanged,
)

# --- changes that a trace has made outside of itself, and the updates that its program ends with


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
        number = builder.guards_of(change.source.own).result(change.source, change.owner)
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


# --- variables of modules, classes and functions: their locations and former values


CODE = (
    types.ModuleType, type, property, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType, functools.partial,
)  # fmt: skip


class Variable:
    """A variable from outside: its location, and its value when it was first met.

    Args:
        owner: a namespace (dict), a cell, a module or a class.
        name: the name of the variable; None for the content of a cell.
        text: the user's spelling of it.
        line: the line that reads or assigns it; empty if it is not known.

    Attributes:
        source: the source of the owner, with the spelling of the variable.
    """

    def __init__(self, owner: Any, name: str | None, text: str, line: str) -> None:
        self.owner, self.name, self.text, self.line = owner, name, text, line
        self.source = Source.of_object(owner, text)
        self.before = self.read()
        self.is_read = self.is_written = False
        self._is_own = isinstance(owner, dict) or name is None or name in vars(owner)

    def read(self) -> Any:
        """Return its current value, or ``MISSING``."""
        if self.name is None:
            try:
                return self.owner.cell_contents
            except ValueError:
                return MISSING
        places = [self.owner] if isinstance(self.owner, dict) else map(vars, bases_of(self.owner))
        return next((place[self.name] for place in places if self.name in place), MISSING)

    @property
    def target(self) -> str:
        """The Python expression of the variable in an update, with ``{}`` for the owner."""
        if self.name is None:
            return "{}.cell_contents"
        return f"{{}}[{self.name!r}]" if isinstance(self.owner, dict) else f"{{}}.{self.name}"

    def put_back(self) -> None:
        """Restore the value that the variable had when it was first met."""
        missing = self.before is MISSING or not self._is_own
        if self.name is None:
            if missing:
                del self.owner.cell_contents
            else:
                self.owner.cell_contents = self.before
        elif isinstance(self.owner, dict):
            if missing:
                del self.owner[self.name]
            else:
                self.owner[self.name] = self.before
        elif missing:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def is_empty(cell: types.CellType) -> bool:
    """Return True if a variable of an enclosing function has no value yet."""
    try:
        cell.cell_contents  # noqa: B018 - it may raise
    except ValueError:
        return True
    return False


def bases_of(owner: Any) -> tuple[Any, ...]:
    """Return the objects that may hold an attribute of a module, class or function."""
    if not isinstance(owner, type):
        return (owner,)
    metas = [meta for meta in type.mro(type(owner)) if not is_library(meta)]
    return *owner.__mro__, *metas


def is_followed(owner: Any, name: str) -> bool:
    """Return True if an attribute of a module, class or function is guarded itself.

    It is not if its owner is library code, or if it is code of an installed package.
    """
    has_members = isinstance(owner, types.ModuleType | types.FunctionType | type)
    if not has_members or is_library(owner):
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(owner, types.ModuleType)
    return not (isinstance(vars(owner).get(name), CODE) and is_installed(owner))
