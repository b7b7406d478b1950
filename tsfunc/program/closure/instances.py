"""Objects and generators that a function reads, watched while it is traced.

See NOTE [attributes] in ``guard_builder.py``.

NOTE [watched classes]
For the time of a trace, a watched class has a ``__getattribute__`` and a ``__setattr__`` that
report the attributes that are read and assigned. The objects stay the same: their class, identity
and ``isinstance`` are unchanged, and a method runs as it is, with its own reads reported too.
Objects without a watcher, and objects on other threads, behave as before. A class that does not
accept attributes (one that is written in C) is not watched.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.fx

from tsfunc.bridge.trace.lifted_tensors import BackwardPasses, has_hooks
from tsfunc.bridge.trace.trace_level import TraceLevel
from tsfunc.bridge.tracers.interrupts import resets, undoing
from tsfunc.bridge.tracers.torch_settings import (
    GeneratorDraws,
    address_of_generator,
    hooks_of_all_modules,
)
from tsfunc.dispatch.state import overriding
from tsfunc.errors import TypeCheckError
from tsfunc.program.assumptions import Assumptions, Retrace
from tsfunc.program.closure.closure_guards import Distinct, ResultIs
from tsfunc.program.closure.guard_builder import Closure, GuardBuilder, NumberHistory
from tsfunc.program.closure.results import Updates
from tsfunc.program.closure.side_effects import (
    ContainerChanges,
    SideEffect,
    changed_containers,
    new_effects,
    updates_of,
)
from tsfunc.program.closure.watched_objects import WatchedObject
from tsfunc.program.guard import Source
from tsfunc.types.inference import STATE
from tsfunc.user_code import user_location

_HOMES = frozenset({"__dict__", *STATE, "_non_persistent_buffers_set"})
_MODULE = torch.nn.Module
_TORCH_LOOKUPS = {
    method.__code__
    for method in (
        _MODULE.__getattr__, _MODULE.__setattr__, _MODULE.__delattr__, _MODULE.register_buffer,
        _MODULE.register_parameter,
    )
}  # fmt: skip


class Instances:
    """The objects that a trace has met; a context manager in which they are watched.

    Args:
        name: the name of the specialized function, for errors.
        closure: the treatment of values that belong to the function: NOTE [closures].
        earlier: the numbers that earlier traces have read: NOTE [numbers that vary].

    Attributes:
        builder: the guards of the values that were read.
        generators: the generators of random numbers that a trace can't record.
        met: called with the functions and classes whose code the trace runs.
        others: yields the changes to variables, which are not attributes of a watched object.
        free_counters: removes traced tensors from objects that the function only changes (NOTE
            [counters] in ``code_reads.py``); returns True if there were any.
        assigned_grads: yields the ``.grad`` of tensors that the function has replaced.
        guard_unchanged: guards the variables that the function may have assigned the values that
            they had, which no program repeats.
        compares_identity: True if the function compares objects by identity (``x is y``) that may
            be tensors: NOTE [tensor aliasing] in ``trace_guards.py``.
    """

    def __init__(
        self,
        name: str,
        closure: Closure = "guard",
        earlier: NumberHistory = types.MappingProxyType({}),
    ) -> None:
        self.name = name
        self.met: Callable[[Any], None] = lambda value: None
        self.others: Callable[[], Iterator[SideEffect]] = lambda: iter(())
        self.free_counters: Callable[[], bool] = lambda: False
        self.assigned_grads: Callable[[], Iterator[SideEffect]] = lambda: iter(())
        self.guard_unchanged: Callable[[], None] = lambda: None
        self._counted_tensors = False
        self.compares_identity = False
        self.generators = TracedGenerators(f"specialize({name})")
        self.builder = GuardBuilder(
            name, self._enter, lambda value: self.met(value), self.generators.add, closure, earlier
        )
        self._containers = ContainerChanges(self.builder)
        self._instances: dict[int, WatchedObject] = {}
        self._watching = WatchedAttributes(self)
        self._undoing = undoing(self._watching.stop)
        self._paused = self._met_modules = False

    def add(self, value: Any, source: Source) -> None:
        """Watch an object that was found at a source."""
        self.builder.guard(value, source)

    def __enter__(self) -> Instances:
        self.generators.start()
        self._undoing.__enter__()
        self._watching.start()
        for instance in self._instances.values():
            self._watching.add(type(instance.value))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                with self.paused():
                    self.guard_unchanged()
        finally:
            self._undoing.__exit__(kind, *exc)

    def _enter(self, value: Any, source: Source) -> None:
        if isinstance(value, torch.nn.Module):
            self._hooks_of_all_modules()
        self._instances[id(value)] = WatchedObject(
            value, source, self.builder, self.paused, lambda method: self.met(method)
        )
        self._watching.add(type(value))
        self.met(type(value))

    def _hooks_of_all_modules(self) -> None:
        """Guard the hooks that torch calls with every module."""
        hooks = hooks_of_all_modules()
        if not self._met_modules:
            guards = self.builder.guards_of(True)
            guards.add(ResultIs(hooks_of_all_modules, (), hooks, "the set of hooks of all modules"))
            for hook in hooks:
                self.met(hook)
        self._met_modules = True

    def read(self, instance: Any, name: str, plain: Any) -> Any:
        """Return the value of an attribute; see :class:`Watcher`."""
        watched = self._instances.get(id(instance))
        if watched is None or self._paused:
            return plain(instance, name)
        # The second frame is the reader. torch's own lookup of parameters reads the __dict__ and
        # the dicts of a module, either for an attribute that `WatchedObject.read` has already
        # looked up or to find the dict to assign to.
        if name in _HOMES and sys._getframe(2).f_code in _TORCH_LOOKUPS:
            return plain(instance, name)
        if not (name.startswith("__") and name.endswith("__")):
            return watched.read(name, plain)
        if name == "__dict__":
            watched.read_all()
        return plain(instance, name)

    def note_assignment(self, instance: Any, name: str, *value: Any) -> None:
        """Check and note an assignment or deletion before it happens; see :class:`Watcher`.

        Raises:
            TypeCheckError: the value is not of the type that the class declares.
        """
        watched = self._instances.get(id(instance))
        if watched is None or self._paused:
            return
        location = watched.lines[name] = str(user_location())
        for item in value:
            watched.check(name, item, f"assigned at {location}")

    def paused(self) -> AbstractContextManager[None]:
        """Pause the watching: reads in the block are not reads of the traced function."""
        return overriding(self, _paused=True)

    def effects_from_now(self) -> Callable[[], list[SideEffect]]:
        """Return a function that returns the assignments of the traced function from now on."""
        with self.paused():
            before, contents = self._assigned(), self._containers.contents()

        def made() -> list[SideEffect]:
            with self.paused():
                changes = self._containers.since(contents)
                return [*new_effects(before, self._assigned()), *changes]

        return made

    def _assigned(self) -> list[SideEffect]:
        """Return the assignments of the traced function to attributes and variables so far."""
        assigned = [instance for instance in self._instances.values() if instance.lines]
        return [*(change for each in assigned for change in each.changes()), *self.others()]

    def restore(self) -> list[SideEffect]:
        """Undo the assignments of the traced function, and return them."""
        with self.paused():
            changes = [
                change for instance in self._instances.values() for change in instance.changes()
            ]
            changes += changed_containers(self.builder)
            changes += self.others()
            changes += self.assigned_grads()
            for change in changes:
                change.undo()
            self.builder.numbers.restore()
            self._counted_tensors = self.free_counters()
        self.generators.restore()
        return changes

    def finish(self) -> list[SideEffect]:
        """End the trace: undo the assignments of the traced function, and return them."""
        # Distinct objects must stay distinct in later calls: the trace has evaluated `a is b`.
        for in_closure in {False, self.builder.closure == "freeze"}:
            guards = self.builder.guards_of(in_closure)
            sources = [i.source for i in self._instances.values()]
            guarded = tuple(
                source for source in sources if self.builder.guards_of(source.in_closure) is guards
            )
            if len(guarded) > 1:
                guards.add(Distinct(guarded))
        return self.restore()

    def updates(self, changes: Sequence[SideEffect], assumptions: Assumptions) -> Updates:
        """Return the assignments that the program ends with.

        Raises:
            TypeCheckError: a program can't repeat one of the assignments.
            Retrace: the function puts tensors into an object that it only changes.
        """
        if self._counted_tensors:
            raise Retrace(assumptions.with_changes(guards_changed=True))
        if self.builder.closure != "freeze":
            self.generators.refuse_advanced()
        return updates_of(changes, self.builder)


# --- classes whose attributes are watched


_GET, _SET, _DELETE = "__getattribute__", "__setattr__", "__delattr__"
_ABSENT: Any = object()

REPLACED_METHODS = frozenset({_GET, _SET, _DELETE})
"""The methods that a class has replaced while it is watched."""


class Watcher(Protocol):
    """The receiver of reads and assignments of attributes."""

    def read(self, instance: Any, name: str, plain: Callable[[Any, str], Any]) -> Any:
        """Return the value of an attribute; ``plain`` reads it as the class itself does."""

    def note_assignment(self, instance: Any, name: str, *value: Any) -> None:
        """Note that an attribute is about to be assigned, or deleted if the value is missing."""


class _Here(threading.local):
    """The watcher of this thread."""

    watcher: Watcher | None = None


class _WatchedClass(NamedTuple):
    """A class whose attributes are watched.

    Attributes:
        originals: the methods of the class under the names that are replaced.
        replacements: the functions that replace them.
        watchers: the blocks in which it is watched.
    """

    originals: dict[str, Any]
    replacements: dict[str, Any]
    watchers: set[WatchedAttributes]


_here = resets(_Here())
_lock = threading.Lock()
_watched: dict[type, _WatchedClass] = {}


class WatchedAttributes:
    """The time in which a watcher receives the reads and assignments of attributes."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._classes: set[type] = set()
        self._outer: Watcher | None = None
        self._started = False

    def start(self) -> None:
        self._started = True
        self._outer, _here.watcher = _here.watcher, self._watcher

    def stop(self) -> None:
        """Stop the reports; it may be called again if it was interrupted."""
        if _here.watcher is self._watcher:
            _here.watcher = self._outer
        for cls in tuple(self._classes):
            _unwatch(cls, self)
        self._classes.clear()
        self._started = False

    def add(self, cls: type) -> None:
        """Report the attributes of a class's instances to the watcher, once it has started."""
        if self._started and cls not in self._classes:
            self._classes.add(cls)
            _watch(cls, self)


def _watch(cls: type, watcher: WatchedAttributes) -> None:
    with _lock:
        watched = _watched.get(cls)
        if watched is None:
            originals = {name: vars(cls).get(name, _ABSENT) for name in (_GET, _SET, _DELETE)}
            replacements = {
                _GET: _watch_reads(_class_function(cls, _GET)),
                _SET: _watch_assignments(_class_function(cls, _SET)),
                _DELETE: _watch_assignments(_class_function(cls, _DELETE)),
            }
            watched = _watched[cls] = _WatchedClass(originals, replacements, set())
        watched.watchers.add(watcher)
        for name, function in watched.replacements.items():
            if vars(cls).get(name) is not function:
                type.__setattr__(cls, name, function)


def _unwatch(cls: type, watcher: WatchedAttributes) -> None:
    with _lock:
        watched = _watched.get(cls)
        if watched is None:
            return
        watched.watchers.discard(watcher)
        if watched.watchers:
            return
        for name, value in watched.originals.items():
            if vars(cls).get(name) is not watched.replacements[name]:
                continue
            if value is _ABSENT:
                type.__delattr__(cls, name)
            else:
                type.__setattr__(cls, name, value)
        del _watched[cls]


def _class_function(cls: type, name: str) -> Any:
    """Return the class's own function, skipping our replacements in the class and its bases."""
    for base in cls.__mro__:
        original = _watched[base].originals.get(name, _ABSENT) if base in _watched else _ABSENT
        function = original if base in _watched else vars(base).get(name, _ABSENT)
        if function is not _ABSENT:
            return function
    raise AssertionError(f"object has {name}")


def _watch_reads(plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        watcher = _here.watcher
        return plain(self, name) if watcher is None else watcher.read(self, name, plain)

    return __getattribute__


def _watch_assignments(plain: Callable[..., None]) -> Callable[..., None]:
    def __setattr__(self: Any, name: str, *value: Any) -> None:
        watcher = _here.watcher
        if watcher is not None:
            watcher.note_assignment(self, name, *value)
        plain(self, name, *value)

    return __setattr__


# --- the ``.grad`` of tensors that a function has from outside: its guards, and its assignments


class ClosureGradients:
    """The ``.grad`` of closed-over tensors, for one trace.

    Args:
        instances: the objects that it watches.
        read_at: called with the user's spelling of each ``.grad`` that is read.
        record: has the function traced again, with autograd recording.
    """

    def __init__(
        self,
        level: TraceLevel,
        instances: Instances,
        read_at: Callable[[str], None],
        record: Callable[[], NoReturn],
    ) -> None:
        self._level, self._instances, self._builder = level, instances, instances.builder
        self.passes = level.backward_passes = BackwardPasses(level, self._read, self._check, record)
        instances.assigned_grads = self._changes
        self._checked: set[int] = set()
        self._read_at = read_at

    def _source(self, tensor: torch.Tensor) -> Source:
        """Return the source of a tensor: an argument, or a tensor that the trace has read."""
        for _, argument in self._level.tensor_guards.arguments:
            if argument.sample is tensor:
                name = argument.name
                return Source.of_argument(argument.position, name)
        source = self._builder.source_of(tensor)
        return source or Source.of_object(tensor, "a tensor")

    def _read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        source = self._source(tensor)
        self._read_at(f"{source.text}.grad")
        with self._instances.paused():
            return self._builder.grad_of(tensor, source)

    def _check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that a backward pass can't add a gradient to.

        Raises:
            TypeCheckError: the tensor has a graph or hooks from outside, which a program does not
                run.
        """
        if id(tensor) in self._checked:
            return
        self._checked.add(id(tensor))
        source = self._source(tensor)
        problem = None
        if not tensor.is_leaf:
            problem = (
                "was computed before the call, by operations that a program does not have",
                ("Pass x.detach().requires_grad_(), or compute it inside of the function"),
            )
        elif has_hooks(tensor):
            problem = (
                "has hooks, which a program does not call",
                ("Remove them, or do their work in the function"),
            )
        if problem is not None:
            why, remedy = problem
            raise TypeCheckError(
                f"{self._level.name}: backward() at {user_location()} would add to "
                f"{source.text}.grad, but {source.text} {why}. {remedy}."
            )
        is_leaf = f"{source.text} is a leaf without hooks"
        guards = self._builder.guards_of(source.in_closure)
        guards.add(ResultIs(_is_plain_leaf, (source,), True, is_leaf))

    def _changes(self) -> Iterator[SideEffect]:
        """Yield the ``.grad`` that the function has replaced."""
        for slot in self.passes.changed():
            source = self._source(slot.owner)
            yield SideEffect(
                f"{source.text}.grad", source, slot.owner, "{}.grad", slot.owner.grad, slot.now,
                undo=lambda: None,
            )  # fmt: skip


def _is_plain_leaf(tensor: torch.Tensor) -> bool:
    """True if a backward pass adds to the ``.grad`` of a tensor and does nothing else."""
    return tensor.is_leaf and not has_hooks(tensor)


# --- generators of random numbers


_SHARED = ("random", "numpy.random")
_State = tuple[Callable[[], Any], Callable[[Any], Any]]


class TracedGenerators:
    """The generators that a traced function may draw from, and their states before the trace."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._before: dict[int, tuple[str, _State, Any]] = {}
        self._known: list[Any] = []  # keeps the objects alive, so that ids stay unique
        self._lines: dict[str, list[str]] = {}
        self._moved: list[str] = []
        self.draws: GeneratorDraws = []

    def start(self) -> None:
        """Record the states of the global generators, which any code can draw from."""
        self._watch("random", random, (random.getstate, random.setstate))
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            state = numpy.get_state, numpy.set_state
            self._watch("numpy.random", numpy, state)

    def add(self, text: str, value: Any) -> None:
        """Record the state of a value that the function reads, if it is a generator."""
        if isinstance(value, random.SystemRandom):  # it has no state
            return
        if isinstance(value, random.Random):
            self._watch(text, value, (value.getstate, value.setstate))
        elif isinstance(value, torch.Generator) and value is not torch.default_generator:
            self._watch(text, value, (value.get_state, value.set_state))
        elif type(value).__module__.startswith("numpy.random"):
            bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
            if hasattr(bits, "state"):
                self._watch(text, value, (lambda: bits.state, lambda s: setattr(bits, "state", s)))

    def note_mention(self, value: Any, line: str) -> None:
        """Record that some code refers to a function or module of random numbers at a line."""
        owner = getattr(value, "__self__", value)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
        module = module.removesuffix(".mtrand")
        if module in _SHARED:
            self._lines.setdefault(module, []).append(line)

    def restore(self) -> None:
        """Restore the states of generators that have changed."""
        for text, (get, put), before in self._before.values():
            shared = text in _SHARED and text not in self._lines
            if not shared and not _same_state(get(), before):
                put(before)
                self._moved.append(text)

    def refuse_advanced(self) -> None:
        """Raise an error if generators had another state at the end of the trace.

        Raises:
            TypeCheckError: the function drew from a generator or seeded it.
        """
        if self._moved:
            lines = [line for text in self._moved for line in self._lines.get(text, ())]
            where = f"Random numbers are used at {'; '.join(lines)}. " if lines else ""
            raise TypeCheckError(
                f"{self._label}: the function draws from {' and '.join(self._moved)}, or seeds it, "
                f"and a program would repeat the numbers of its first call. {where}Draw numbers "
                f"before the call and pass them, draw tensors (torch.rand), or seed before the "
                f"call."
            )

    def refuse_made(self) -> None:
        """Raise an error if the function drew from a generator that it did not get from outside.

        Raises:
            TypeCheckError: the function has made the generator.
        """
        defaults = torch.default_generator, *torch.cuda.default_generators
        generators = {
            address_of_generator(each)
            for each in (*defaults, *self._known) if isinstance(each, torch.Generator)
        }  # fmt: skip
        for generator, line in self.draws:
            if address_of_generator(generator) not in generators:
                raise TypeCheckError(
                    f"{self._label}: the function draws from a torch.Generator that it makes, at "
                    f"{line}, and a program would go on with its numbers at the next call. Make "
                    f"and seed it outside of the function, or draw the numbers before the call."
                )

    def _watch(self, text: str, value: Any, state: _State) -> None:
        if id(value) not in self._before:
            self._known.append(value)
            self._before[id(value)] = text, state, state[0]()


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_same_state, a, b))
    return bool((a == b).all()) if hasattr(a, "__array__") else bool(a == b)
