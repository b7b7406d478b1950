"""Objects among a function's arguments and variables, watched while it is traced.

See NOTE [attributes] in ``guard_builder.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.fx

from tsfunc.bridge.trace.opaque import OpaqueValue
from tsfunc.bridge.trace.outside_tensors import BackwardPasses, has_hooks
from tsfunc.bridge.trace.scaling import REPLACED
from tsfunc.bridge.trace.tracing import TraceLevel, is_traced
from tsfunc.bridge.tracers.torch_state import hooks_of_all_modules
from tsfunc.dispatch.libraries import is_installed
from tsfunc.dispatch.places import users_place
from tsfunc.errors import TypeCheckError
from tsfunc.program.assumptions import Assumptions, Retrace
from tsfunc.program.closure.followed import Watching
from tsfunc.program.closure.guard_builder import (
    Closure,
    Earlier,
    GuardBuilder,
    is_instance,
)
from tsfunc.program.closure.guard_codegen import Source
from tsfunc.program.closure.read_guards import (
    AnswerIs,
    Distinct,
    KeysAre,
    MemberIs,
    Missing,
    ReadGuards,
    SameContents,
    SameObject,
)
from tsfunc.program.closure.results import (
    Updates,
    has_tensor,
)
from tsfunc.program.closure.side_effects import (
    MISSING,
    SideEffect,
    TracedGenerators,
    changed_containers,
    updates_of,
)
from tsfunc.types import check
from tsfunc.types.annotation import attribute_types, says_any

_STATE = ("_parameters", "_buffers", "_modules")
_HOMES = frozenset({"__dict__", *_STATE, "_non_persistent_buffers_set"})
_MODULE = torch.nn.Module
_TORCH_LOOKUPS = {
    method.__code__
    for method in (
        _MODULE.__getattr__, _MODULE.__setattr__, _MODULE.__delattr__, _MODULE.register_buffer,
        _MODULE.register_parameter,
    )
}  # fmt: skip


class Instances:
    """The objects that a trace knows; a context manager in which they are watched.

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
        hold_unchanged: guards the variables that the function may have assigned the values that
            they had, which no program repeats.
        compares_identity: whether the function compares objects by identity (``x is y``) that may
            be tensors: NOTE [tensor aliasing] in ``guards.py``.
    """

    def __init__(
        self, name: str, closure: Closure = "guard", earlier: Earlier = types.MappingProxyType({})
    ) -> None:
        self.name = name
        self.met: Callable[[Any], None] = lambda value: None
        self.others: Callable[[], Iterator[SideEffect]] = lambda: iter(())
        self.free_counters: Callable[[], bool] = lambda: False
        self.assigned_grads: Callable[[], Iterator[SideEffect]] = lambda: iter(())
        self.hold_unchanged: Callable[[], None] = lambda: None
        self._counted_tensors = False
        self.compares_identity = False
        self.generators = TracedGenerators(f"specialize({name})")
        self.builder = GuardBuilder(
            name, self._enter, lambda value: self.met(value), self.generators.add, closure, earlier
        )
        self._instances: dict[int, WatchedObject] = {}
        self._watching = Watching(self)
        self._paused = self._met_modules = False

    def add(self, value: Any, source: Source) -> None:
        """Watch an object that was found at a place."""
        self.builder.guard(value, source)

    def __enter__(self) -> Instances:
        self.generators.start()
        self._watching.__enter__()
        for instance in self._instances.values():
            self._watching.add(type(instance.value))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                with self.paused():
                    self.hold_unchanged()
        finally:
            self._watching.__exit__(kind, *exc)

    def _enter(self, value: Any, source: Source) -> None:
        if isinstance(value, torch.nn.Module):
            self._hooks_of_all_modules()
        self._instances[id(value)] = WatchedObject(self, value, source)
        self._watching.add(type(value))
        self.met(type(value))

    def _hooks_of_all_modules(self) -> None:
        """Guard the hooks that torch calls with every module."""
        hooks = hooks_of_all_modules()
        if not self._met_modules:
            guards = self.builder.guards_of(True)
            guards.add(AnswerIs(hooks_of_all_modules, (), hooks))
            for hook in hooks:
                self.met(hook)
        self._met_modules = True

    def read(self, instance: Any, name: str, plain: Any) -> Any:
        """Return the value of an attribute; see `Watching`."""
        known = self._instances.get(id(instance))
        if known is None or self._paused:
            return plain(instance, name)
        # The second frame is the reader. torch's own lookup of parameters reads the __dict__ and
        # the dicts of a module, either for an attribute that `Instance.read` has already looked up
        # or to find the dict to assign to.
        if name in _HOMES and sys._getframe(2).f_code in _TORCH_LOOKUPS:
            return plain(instance, name)
        if not (name.startswith("__") and name.endswith("__")):
            return known.read(name, plain)
        if name == "__dict__":
            known.read_all()
        return plain(instance, name)

    def assigned(self, instance: Any, name: str, *value: Any) -> None:
        """Check and note an assignment or deletion before it happens; see `Watching`.

        Raises:
            TypeCheckError: the value is not of the type that the class declares.
        """
        known = self._instances.get(id(instance))
        if known is None or self._paused:
            return
        place = known.lines[name] = str(users_place())
        for each in value:
            known.check(name, each, f"assigned at {place}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the watching: reads in the block are not reads of the traced function."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def put_back(self) -> list[SideEffect]:
        """Undo the assignments of the traced function, and return them."""
        with self.paused():
            changes = [change for each in self._instances.values() for change in each.changes()]
            changes += changed_containers(self.builder)
            changes += self.others()
            changes += self.assigned_grads()
            for change in changes:
                change.undo()
            self.builder.numbers.put_back()
            self._counted_tensors = self.free_counters()
        self.generators.put_back()
        return changes

    def finish(self, assumptions: Assumptions) -> Updates:
        """End the trace: undo the assignments of the traced function.

        Args:
            assumptions: those of the trace.

        Returns:
            The assignments that the program ends with.

        Raises:
            TypeCheckError: a program can't repeat one of the assignments.
            Retrace: the function puts tensors into an object that it only changes.
        """
        # Distinct objects must stay distinct in later calls: the trace has answered `a is b`.
        for own in {False, self.builder.closure == "freeze"}:
            guards = self.builder.guards_of(own)
            known = [i.source for i in self._instances.values()]
            alike = tuple(each for each in known if self.builder.guards_of(each.own) is guards)
            if len(alike) > 1:
                guards.add(Distinct(alike))
        changes = self.put_back()
        if self._counted_tensors:
            raise Retrace(assumptions.moved(guards_changed=True))
        if self.builder.closure != "freeze":
            self.generators.refuse_moved()
        return updates_of(changes, self.builder)


class WatchedObject:
    """A watched object: its contents when it was first met, and the reads of it.

    Attributes:
        lines: for each assigned attribute, the line that assigns it.
    """

    def __init__(self, instances: Instances, value: Any, source: Source) -> None:
        self.instances = instances
        self.value = value
        self.source = source
        self.lines: dict[str, str] = {}
        self._held: set[str] = set()
        self._before = _contents(value)

    def read(self, name: str, plain: Any) -> Any:
        """Return the value of an attribute; guard it if it is data."""
        found = inspect.getattr_static(type(self.value), name, MISSING)
        if _is_data_descriptor(found):
            if _is_slot(found):
                return self._hold(name, plain(self.value, name), f".{name}")
            self._descriptor(name, found)
            return plain(self.value, name)  # a property runs, and the values it reads are guarded
        self._watch_descriptor(name, found)
        home, value = _find(self.value, name)
        if home is not None:
            # A value that was assigned during the trace is not guarded.
            assigned = self._before.get((home, name), MISSING) is not value
            return value if assigned else self._hold(name, value, *_steps(home, name))
        if isinstance(found, functools.cached_property):
            self._require_none_of_its_own(name)
            return found.func(self.value)  # the result is not cached: the object stays unchanged
        try:
            value = plain(self.value, name)
        except AttributeError:
            self._absent(name)
            raise
        if found is not MISSING and hasattr(type(found), "__get__"):
            self._method(name, found)
            if isinstance(found, types.FunctionType) and found in REPLACED:
                return types.MethodType(REPLACED[found], self.value)
            return value
        # An attribute of the class, or one made by a user's __getattribute__.
        return self._hold(name, value, f".{name}")

    def read_all(self) -> None:
        """Guard all attributes of the object, since its ``__dict__`` was read."""
        own = [name for home, name in self._before if home == _DICT]
        self._guards.add(KeysAre(self.source.attribute("__dict__"), own))
        for home, name in self._before:
            if home != _SLOT:
                self._hold(name, self._before[home, name], *_steps(home, name), exactly=True)

    @property
    def _guards(self) -> ReadGuards:
        return self.instances.builder.guards_of(self.source.own)

    def changes(self) -> Iterator[SideEffect]:
        """Yield the changes to attributes that the function has made."""
        now = _contents(self.value)
        for home, name in {**self._before, **now}:
            before = self._before.get((home, name), MISSING)
            after = now.get((home, name), MISSING)
            problem = _problem(self.value, home, before, after)
            if after is before and (problem or not self._is_assigned_anew(name, before)):
                continue
            target = f"{{}}.{name}" if home == _SLOT else f"{{}}.{home}[{name!r}]"
            yield SideEffect(
                f"{self.source.text}.{name}",
                self.source,
                self.value,
                target,
                before,
                after,
                undo=functools.partial(_restore, self.value, home, name, before),
                line=self.lines.get(name),
                problem=problem,
                buffer=name if home == "_buffers" else None,
            )

    def _is_assigned_anew(self, name: str, value: Any) -> bool:
        """Return True if an attribute was assigned the value that it had, which no guard holds."""
        held = name in self._held and (self.source.own or not has_tensor(value))
        return name in self.lines and not held

    def _hold(self, name: str, value: Any, *steps: str, exactly: bool = False) -> Any:
        """Guard the value of an attribute, once; return it as the function sees it.

        Args:
            name: the attribute.
            value: its value.
            steps: the Python expressions of the steps to it.
            exactly: whether a number is guarded by its value even if it varies.
        """
        builder = self.instances.builder
        numbers = builder.numbers
        if name not in self._held and not is_traced(value):
            self._held.add(name)
            if self.source.own and not name.startswith("_"):
                self.instances.builder.refuse_own(f"{self.source.text}.{name}", str(users_place()))
            text, owner = f"{self.source.text}.{name}", f"{type(self.value).__name__}.{name}"
            with self.instances.paused():
                self.check(name, value, f"read at {users_place()}")
                source = self.source
                for step in steps:
                    source = source.at("{}" + step, text, owner)
                if not exactly and numbers.is_input(value, text):
                    numbers.add(value, source, self._guards)
                else:
                    builder.guard(value, source)
        number = numbers.inputs.get(f"{self.source.text}.{name}")
        if number is not None and value is number.value and name not in self.lines:
            if exactly:
                self._guards.add(SameContents(number.source, number.value))
            else:
                return numbers.of(f"{self.source.text}.{name}")
        return self._typed(name, value)

    def _typed(self, name: str, value: Any) -> Any:
        """Return the value, or a stand-in for it if its class declares the attribute as ``Any``."""
        cls = type(self.value)
        if value is None or is_traced(value) or is_installed(cls) or not says_any(cls, name):
            return value
        mend = f"{cls.__name__} declares it so: annotate it there with a concrete type."
        return OpaqueValue(value, f"{self.source.text}.{name}", mend)

    def check(self, name: str, value: Any, use: str) -> None:
        """Check an attribute against the annotation in the user's class.

        Args:
            name: the attribute.
            value: its value.
            use: how and where the attribute is used, for errors.

        Raises:
            TypeCheckError: the value is not of the declared type.
        """
        cls = type(self.value)
        owner = f"{cls.__name__}.{name}"
        declared = None if is_installed(cls) else attribute_types(cls).get(name)
        mismatches = [] if declared is None else check(value, declared, owner)
        if mismatches:
            listed = "".join(f"  {mismatch}\n" for mismatch in mismatches)
            raise TypeCheckError(
                f"specialize({self.instances.name}): {owner}, {use}, is not what its class "
                f"declares:\n{listed}Assign what is declared, or declare what is assigned."
            )

    def _method(self, name: str, found: Any) -> None:
        """Guard a method: its class still has it, and the object has no attribute of that name."""
        if name in self._held:
            return
        self._require_none_of_its_own(name)
        cls = type(self.value)
        if isinstance(found, types.FunctionType) and (found.__module__ or "").startswith("torch."):
            base = next(base for base in cls.__mro__ if name in vars(base))
            self._guards.add(MemberIs(base, name, found))
        elif isinstance(found, types.FunctionType):
            self._guards.add(SameObject(Source.of_object(cls).attribute(name), found))
        elif not isinstance(found, _OF_C):
            self._require_in_class(name, found)
        self.instances.met(found)

    def _descriptor(self, name: str, found: Any) -> None:
        """Guard a property: its class still has it."""
        if name not in self._held:
            self._held.add(name)
            self._require_in_class(name, found)
        self._watch_descriptor(name, found)

    def _watch_descriptor(self, name: str, found: Any) -> None:
        """Watch a descriptor of a user's class: its methods may read its attributes."""
        builder = self.instances.builder
        if not hasattr(type(found), "__get__") or not is_instance(found) or builder.is_known(found):
            return
        base = next(base for base in type(self.value).__mro__ if name in vars(base))
        source = Source.of_object(base, f"{base.__name__}.__dict__[{name!r}]", own=self.source.own)
        builder.guard(found, source.at(f"{{}}.__dict__[{name!r}]"))

    def _require_in_class(self, name: str, found: Any) -> None:
        """Guard the descriptor of an attribute in its class, unless it is in a class of torch."""
        base = next((base for base in type(self.value).__mro__ if name in vars(base)), None)
        if base is not None and not base.__module__.startswith("torch."):
            source = Source.of_object(base).at(f"{{}}.__dict__[{name!r}]")
            self._guards.add(SameObject(source, found))

    def _require_none_of_its_own(self, name: str) -> None:
        """Guard that the object has no attribute of this name, which would hide the class's."""
        if name not in self._held and _has_dict(self.value):
            own = self.source.attribute("__dict__")
            self._guards.add(Missing(own, name, "{1!r} in {0}"))
        self._held.add(name)

    def _absent(self, name: str) -> None:
        """Guard that an attribute is missing; a user's ``__getattr__`` runs and may make it."""
        made = hasattr(type(self.value), "__getattr__")
        if made and not isinstance(self.value, torch.nn.Module):
            self._require_none_of_its_own(name)
        elif name not in self._held:
            self._held.add(name)
            self._guards.add(Missing(self.source, name))


_OF_C = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip

# --- the locations of an object's attributes

_DICT, _SLOT = "__dict__", "slot"


def _contents(value: Any) -> dict[tuple[str, str], Any]:
    """Return all attributes of an object, by their location and name."""
    own = _dict_of(value)
    found = {(_DICT, name): each for name, each in own.items()}
    for kind in _STATE if isinstance(value, torch.nn.Module) else ():
        found.update({(kind, name): each for name, each in (own.get(kind) or {}).items()})
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[_SLOT, name] = slot.__get__(value)
                except AttributeError:  # not assigned
                    continue
    return found


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has only slots
        return {}
    return own


def _has_dict(value: Any) -> bool:
    return any("__dict__" in vars(cls) for cls in type(value).__mro__)


def _find(value: Any, name: str) -> tuple[str | None, Any]:
    """Return the location of an attribute in the object itself, and its value."""
    own = _dict_of(value)
    if name in own:
        return _DICT, own[name]
    if isinstance(value, torch.nn.Module):
        for kind in _STATE:
            state = own.get(kind) or {}
            if name in state:
                return kind, state[name]
    return None, None


def _steps(home: str, name: str) -> tuple[str, ...]:
    """Return the steps to an attribute, which bypass torch's slow lookup of parameters."""
    return (f".{home}", f"[{name!r}]") if home in _STATE else (f".{name}",)


def _restore(value: Any, home: str, name: str, before: Any) -> None:
    if home == _SLOT:
        slot = inspect.getattr_static(type(value), name)
        slot.__delete__(value) if before is MISSING else slot.__set__(value, before)
        return
    own = _dict_of(value)
    state = own if home == _DICT else own[home]
    if before is MISSING:
        del state[name]
    else:
        state[name] = before


def _problem(owner: Any, home: str, before: Any, after: Any) -> str | None:
    """Return the reason why a program can't assign to an attribute of a module, or None."""
    if not isinstance(owner, torch.nn.Module):
        return None
    if home == "_parameters" or isinstance(after, torch.nn.Parameter):
        return "is a parameter; write into it in place, under torch.no_grad()"
    if home == "_modules" or isinstance(after, torch.nn.Module):
        return "is a submodule; put it in its place before the call"
    if home == "_buffers" and before is MISSING:
        return "is a new buffer; register it before the call, in __init__"
    if home != "_buffers" and (has_tensor(before) or has_tensor(after)):
        return "has a tensor; register it as a buffer (register_buffer), which can be assigned"
    return None


def _is_data_descriptor(found: Any) -> bool:
    return hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")


def _is_slot(found: Any) -> bool:
    """Return True if a descriptor reads a field of the object itself."""
    return isinstance(found, types.MemberDescriptorType | types.GetSetDescriptorType)


# --- the ``.grad`` of tensors that a function has from outside: its guards, and its assignments


class Gradients:
    """The ``.grad`` of tensors from outside, for one trace.

    Args:
        level: the trace.
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
        self.passes = level.passes = BackwardPasses(level, self._read, self._check, record)
        instances.assigned_grads = self._changes
        self._checked: set[int] = set()
        self._read_at = read_at

    def _source(self, tensor: torch.Tensor) -> Source:
        """Return the source of a tensor: an argument, or a tensor that the trace has read."""
        for _, argument in self._level.tensor_guards.arguments:
            if argument.example is tensor:
                name = argument.name
                return Source.of_argument(argument.position, name)
        known = self._builder.source_of(tensor)
        return known or Source.of_object(tensor, "a tensor")

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
                ("Remove them, or do in the function what they do"),
            )
        if problem is not None:
            why, mend = problem
            raise TypeCheckError(
                f"{self._level.name}: backward() at {users_place()} would add to "
                f"{source.text}.grad, but {source.text} {why}. {mend}."
            )
        self._builder.guards_of(source.own).add(AnswerIs(_is_plain_leaf, (source,), True))

    def _changes(self) -> Iterator[SideEffect]:
        """Yield the ``.grad`` that the function has replaced."""
        for slot in self.passes.changed():
            source = self._source(slot.owner)
            yield SideEffect(
                f"{source.text}.grad", source, slot.owner, "{}.grad", slot.owner.grad, slot.now,
                undo=lambda: None,
            )  # fmt: skip


def _is_plain_leaf(tensor: torch.Tensor) -> bool:
    """Return True if a backward pass adds to the ``.grad`` of a tensor and does nothing else."""
    return tensor.is_leaf and not has_hooks(tensor)
