"""Side effects of a traced function on variables, containers and objects.

See NOTE [updates] in ``results.py``.

NOTE [random numbers from outside]
A draw of ``torch.rand`` is an operator of the program, which draws at every call. Numbers of
``random`` and ``numpy.random`` are Python values, which the trace would record as constants. A
generator that is seeded while the function is traced is not seeded when its program runs. Both
cases are detected by comparing the states of the generators before and after the trace: the trace
itself does not change them. The global generators are shared by all threads, so a change of their
state counts only if the function's code refers to their modules. Calls of functions of
``torch.random`` that seed, or read a state, are handled in ``bridge/tracers/torch_settings.py``.
"""

from __future__ import annotations

import functools
import itertools
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import optree
import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.control.node_writes import written_arguments
from tsfunc.bridge.sizes.fake_results import storage_address
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.trace.data_dependence import remedies
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import ClosureError, DataDependentError, EscapedTracerError, TypeCheckError
from tsfunc.program.closure.guard_builder import (
    ContainerSnapshot,
    GuardBuilder,
    has_changed,
    is_namespace,
    restore,
)
from tsfunc.program.closure.results import (
    UnrepeatableValue,
    Update,
    Updates,
    UpdateValues,
    replaced_tensors,
    same_except_tensors,
)
from tsfunc.program.guard import Source
from tsfunc.types.reading import signature_of
from tsfunc.user_code import condition_text, error_location, is_installed, is_library, source_line

# --- changes that a trace has made outside of itself, and the updates that its program ends with


MISSING: Any = object()
"""Stands for a value that does not exist."""


@dataclass(frozen=True)
class SideEffect:
    """An assignment of the traced function.

    Attributes:
        text: the user's spelling of the target.
        source: the source of the owner.
        owner: the object that the target belongs to.
        target: the Python expression of the target, as in ``Update``.
        before: the value before the trace, or ``MISSING``.
        after: the value at the end of the trace, or ``MISSING``.
        undo: restores the old value.
        line: the line of the assignment, if it is known.
        problem: the reason why a program can't repeat the assignment, if it can't.
        fills: True if the target is a container with new elements.
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
    return (
        _effect_of_filling(container)
        for container in builder.containers
        if has_changed(container, builder.numbers)
    )


def _container_elements(container: ContainerSnapshot) -> Any:
    """Return the elements of a container; a namespace has those of its dict."""
    value = container.value
    return vars(value) if is_namespace(value) else value


def _effect_of_filling(container: ContainerSnapshot) -> SideEffect:
    """Return the side effect of new elements in a container."""
    elements = _container_elements(container)
    # A copy, since `undo` restores the container itself.
    after = dict(elements) if isinstance(elements, dict) else type(elements)(elements)
    return SideEffect(
        container.source.text,
        container.source,
        container.value,
        "{}" if elements is container.value else "vars({})",
        container.before,
        after if isinstance(after, dict | set) else list(after),
        undo=functools.partial(restore, container),
        fills=True,
    )


class Contents(NamedTuple):
    """The elements of containers, each with its own elements, or the keys and values of its dict.

    Attributes:
        containers: the number of containers.
        lengths: the number of elements of each.
        elements: the elements of all.
    """

    containers: int
    lengths: list[int]
    elements: list[Any]


class ContainerChanges:
    """Finds the containers whose elements a part of a trace changes.

    A model has thousands of containers, so that all of them are read at once, in C.
    """

    def __init__(self, builder: GuardBuilder) -> None:
        self._builder = builder
        self._owners: list[ContainerSnapshot] = []
        self._parts: list[Collection[Any]] = []
        self._read = 0  # the number of containers among the owners

    def contents(self, parts: int | None = None) -> Contents:
        """Return the elements of the containers that the trace has read, or of the first parts."""
        for container in self._builder.containers[self._read :]:
            elements = _container_elements(container)
            both = [elements, elements.values()] if isinstance(elements, dict) else [elements]
            self._parts += both
            self._owners += [container] * len(both)
        self._read = len(self._builder.containers)
        chosen = self._parts[:parts]
        return Contents(self._read, [*map(len, chosen)], [*itertools.chain.from_iterable(chosen)])

    def since(self, before: Contents) -> Iterator[SideEffect]:
        """Yield the changes of containers since their elements were read."""
        now = self.contents(len(before.lengths))
        if now.lengths != before.lengths or not all(map(is_, now.elements, before.elements)):
            seen, same = iter(now.elements), self._builder.numbers.is_same
            earlier, found = iter(before.elements), {}
            for owner, *lengths in zip(self._owners, now.lengths, before.lengths, strict=False):
                pairs = [
                    [*itertools.islice(elements, length)]
                    for elements, length in zip((seen, earlier), lengths, strict=True)
                ]
                if lengths[0] != lengths[1] or not all(map(same, *pairs)):
                    found[id(owner)] = owner
            yield from map(_effect_of_filling, found.values())
        for container in self._builder.containers[before.containers :]:
            if has_changed(container, self._builder.numbers):
                yield _effect_of_filling(container)


def new_effects(before: Sequence[SideEffect], after: Sequence[SideEffect]) -> list[SideEffect]:
    """Return the assignments that were not there before, or have other values now."""
    effects_before = {(id(each.owner), each.target): each for each in before}

    def is_new(effect: SideEffect) -> bool:
        earlier = effects_before.get((id(effect.owner), effect.target))
        return earlier is None or earlier.after is not effect.after

    return [effect for effect in after if is_new(effect)]


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
        if problem is None and change.source.in_closure and builder.closure == "freeze":
            problem = 'is a constant, by closure="freeze"'
        stored = None
        if problem is None and change.after is not MISSING:
            try:
                stored = values.stored_form(change.after)
            except UnrepeatableValue as error:
                problem = f"gets {error}"
            for tensor in values.tensors:
                _refuse_escaping(change.text, tensor)
        if problem is not None:
            problems.append(f"  {change.text}{at}: it {problem}.\n")
            continue
        for tensor in replaced_tensors(change.before, change.after):
            builder.make_input(tensor)
        number = builder.guards_of(change.source.in_closure).add_input(change.source, change.owner)
        keeps = change.text not in builder.read or same_except_tensors(change.before, change.after)
        updates.append(
            Update(
                change.text, number, change.target, stored, change.fills, change.after is MISSING,
                change.buffer, keeps,
            )
        )  # fmt: skip
    if problems:
        raise TypeCheckError(
            f"specialize({builder.name}): the function assigns to objects that outlive the call, "
            f"and a program can't repeat these assignments:\n{''.join(problems)}"
            f"Return the new value instead, or write it into an existing tensor (x.copy_(value)). "
            f"If only the first call assigns, as for a setup, call the function once before it is "
            f"specialized."
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
        self._is_user_check = isinstance(owner, dict) or name is None or name in vars(owner)

    def read(self) -> Any:
        """Return its current value, or ``MISSING``."""
        if self.name is None:
            try:
                return self.owner.cell_contents
            except ValueError:
                return MISSING
        namespaces = (
            [self.owner] if isinstance(self.owner, dict) else map(vars, bases_of(self.owner))
        )
        return next((names[self.name] for names in namespaces if self.name in names), MISSING)

    @property
    def target(self) -> str:
        """The Python expression of the variable in an update, with ``{}`` for the owner."""
        if self.name is None:
            return "{}.cell_contents"
        return f"{{}}[{self.name!r}]" if isinstance(self.owner, dict) else f"{{}}.{self.name}"

    def restore(self) -> None:
        """Restore the value that the variable had when it was first met."""
        missing = self.before is MISSING or not self._is_user_check
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
    """True if a variable of an enclosing function has no value yet."""
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
    """True if an attribute of a module, class or function is guarded itself.

    An attribute is not guarded if its owner is library code, or if it is code of an installed
    package.
    """
    has_members = isinstance(owner, types.ModuleType | types.FunctionType | type)
    if not has_members or is_library(owner):
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(owner, types.ModuleType)
    return not (isinstance(vars(owner).get(name), CODE) and is_installed(owner))


# --- checks for the things that a traced function may not do, with their errors


def check_texts(
    label: str, leaves: Sequence[Any], tree: optree.PyTreeSpec, symbols: Symbols
) -> None:
    """Refuse a string result, or a key, that contains the text of a traced value.

    Raises:
        DataDependentError: a string contains the text of a traced value.
    """
    keys = (entry for path in tree.paths() for entry in path)
    for text in (*leaves, *keys):
        if not isinstance(text, str):
            continue
        spelled = "a tensor" if _TRACER in text else symbols.spelled_in(text)
        if spelled is not None:
            raise DataDependentError(
                f"{label}: the function returns the text {symbols.in_users_names(text)!r}, in "
                f"which {spelled} is a symbol of the trace, not the value of a call. Return the "
                f"number or the tensor itself, and write the text outside of the function; or make "
                f"it one number with int(...), if the descriptors leave it open or fix it."
            )


def check_bodies(label: str, updates: Updates, leaves: Sequence[Any], level: TraceLevel) -> None:
    """Refuse values of control-flow bodies that leave the body other than as its results.

    Raises:
        TypeCheckError: a value leaves the body in another way.
    """
    assigned = {slot.index: update.text for update in updates.updates for slot in update.slots()}
    texts = [*(["the function's result"] * len(leaves)), *map(assigned.get, range(len(assigned)))]
    for text, value in zip(texts, (*leaves, *updates.tensors), strict=True):
        if not isinstance(value, TraceTracer) or value.dispatch_level is level:
            continue
        if value.node.graph is not level.graph and not value.dispatch_level.alive:
            location = value.node.meta.get("location")
            at = "" if location is None else f" (at {location}{source_line(location, ': ')})"
            raise TypeCheckError(
                f"{label}: {text} is a value of the body of a branch, a loop or a checkpoint{at}, "
                f"and a program has only the body's results. Return it from the body, and assign "
                f"or return the result of the call."
            )


_TRACER = "TraceTracer("  # the text of a tensor in a trace

# Errors of torch about symbolic numbers, and the unsupported use that each is about.
_NO_SYMBOLS = {
    "unhashable type: non-nested Sym": (
        "can't be a key of a dict, an element of a set or an argument of lru_cache"
    ),
    "unsupported format string passed to Sym": "has no digits to write",
}


def rewrite_size_error(label: str, symbols: Symbols, error: Exception) -> None:
    """Rewrite torch's error about sizes in the user's names.

    Raises:
        DataDependentError: a size that depends on data was used as a Python value.
    """
    text, about_data = symbols.explain_error(error)
    if about_data:
        location = error_location(error)
        if _is_iteration(error):
            raise DataDependentError(
                f"{label}: the number of rows of a tensor depends on data, which a trace does not "
                f"have, and a Python loop over the rows needs it at "
                f"{location}{source_line(location, ': ')}\nWrite the loop as tsfunc.scan(f, init, "
                f"rows), which calls f(carry, row) for as many rows as there are when the program "
                f"runs."
            ) from None
        condition = condition_text(location)
        raise DataDependentError(
            f"{label}: {condition or text} depends on data, which a trace does not have, and is "
            f"needed at {location}{source_line(location, ': ')}\nIf it always holds, state it "
            f"before with torch._check({condition or '...'}): the program then checks it when it "
            f"runs. {remedies()}"
        ) from None
    for theirs, ours in _NO_SYMBOLS.items() if isinstance(error, TypeError) else ():
        if theirs in text:
            location = error_location(error)
            text = (
                f"{label}: a named dim, or a number that stays open, {ours} "
                f"(at {location}{source_line(location, ': ')})\nUse int(...) of it, which fixes "
                f"the program to one number: describe the size as None, or the number by its value."
            )
    # The text of a KeyError is the repr of its key; the key stays unchanged.
    if len(error.args) == 1 and isinstance(error.args[0], str) and text != str(error):
        error.args = (text,)


def _is_iteration(error: Exception) -> bool:
    """Return True if an error was raised while Python iterated over a tensor."""
    code = torch.Tensor.__iter__.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def check_containers(
    label: str,
    func: Callable[..., Any],
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    leaves: Sequence[Any],
    tree: optree.PyTreeSpec,
) -> None:
    """Refuse a function that changes a list or dict among its arguments.

    Raises:
        TypeCheckError: the function did so.
    """
    now, structure = pytrees.flatten(arguments)
    if structure == tree and all(a is b for a, b in zip(now, leaves, strict=True)):
        return
    args, kwargs = arguments
    args_before, kwargs_before = pytrees.unflatten(tree, leaves)
    pairs = [(str(i), args_before[i], value) for i, value in enumerate(args)]
    pairs += [(name, kwargs_before[name], value) for name, value in kwargs.items()]
    names = list(signature_of(func).parameters)
    for name, before, after in pairs:
        (some, one), (others, other) = pytrees.flatten(before), pytrees.flatten(after)
        if one != other or any(a is not b for a, b in zip(some, others, strict=True)):
            at = int(name) if name.isdigit() else -1
            name = names[at] if 0 <= at < len(names) else name
            raise TypeCheckError(
                f"{label}: the function changes the {type(after).__name__} that it gets as "
                f"`{name}`, or one inside of it. A program gets only its elements, and can't "
                f"change the caller's container: return the new values, or change a copy."
            )


def check_frozen(name: str, level: TraceLevel, closure_positions: Mapping[int, int]) -> None:
    """Refuse a program that writes into tensors that it holds as constants.

    Raises:
        ClosureError: the program writes into one of its constants.
    """
    memory = {
        storage_address(tracer.value)
        for tensor, tracer in level.lifted.values()
        if id(tensor) not in closure_positions
    }
    for node in level.graph.nodes:
        for target in written_arguments(node):
            value = target.meta.get("val")
            if isinstance(value, torch.Tensor) and storage_address(value) in memory:
                called = node.meta.get("op", node.target)
                raise ClosureError(
                    f'specialize({name}, closure="freeze"): {called.name} writes into a tensor '
                    f"that is not an argument, and becomes a constant. Make it an argument, or use "
                    f'closure="guard".'
                )
