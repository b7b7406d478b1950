"""An object whose attributes a trace watches: the guards on its reads, and its changes."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from tsfunc.bridge.trace.replaced_members import REPLACED_ATTRIBUTES, REPLACED_METHODS
from tsfunc.bridge.tracers.nesting import is_of_active_level
from tsfunc.errors import TypeCheckError
from tsfunc.program.closure.closure_guards import (
    IN_DICT,
    ClosureGuards,
    KeysAre,
    MemberIs,
    Missing,
    SameContents,
    SameObject,
)
from tsfunc.program.closure.guard_builder import GuardBuilder, is_watched
from tsfunc.program.closure.results import has_tensor
from tsfunc.program.closure.side_effects import MISSING, SideEffect
from tsfunc.program.guard import Source
from tsfunc.types import check
from tsfunc.types.annotation import attribute_types
from tsfunc.types.inference import STATE
from tsfunc.user_code import is_installed, user_location

"""The dicts of a module in which torch keeps its parameters, buffers and submodules."""


class WatchedObject:
    """A watched object: its contents when it was first met, and the reads of it.

    Args:
        builder: the guards of the values that the trace has read.
        paused: returns a context in which reads are not reads of the traced function.
        on_method: called with the methods that the function uses.

    Attributes:
        lines: for each assigned attribute, the line that assigns it.
    """

    def __init__(
        self,
        value: Any,
        source: Source,
        builder: GuardBuilder,
        paused: Callable[[], AbstractContextManager[None]],
        on_method: Callable[[Any], None],
    ) -> None:
        self._builder, self._paused, self._met = builder, paused, on_method
        self.value = value
        self.source = source
        self.lines: dict[str, str] = {}
        self._held: set[str] = set()
        # The attributes with numbers that are inputs: the value, its source, the value with
        # symbols.
        self._inputs: dict[str, tuple[Any, Source, Callable[[], Any]]] = {}
        self._before = _contents(value)

    def read(self, name: str, plain: Any) -> Any:
        """Return the value of an attribute; guard it if it is data."""
        replaced = REPLACED_ATTRIBUTES.get(name)
        if replaced is not None and isinstance(self.value, replaced[0]):
            return replaced[1](self.value)
        member = inspect.getattr_static(type(self.value), name, MISSING)
        if hasattr(type(member), "__set__") or hasattr(type(member), "__delete__"):
            if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                return self._hold(name, plain(self.value, name), f".{name}")
            self._descriptor(name, member)
            return plain(self.value, name)  # a property runs, and the values it reads are guarded
        self._watch_descriptor(name, member)
        home, value = _find(self.value, name)
        if home is not None:
            # A value that was assigned during the trace is not guarded.
            assigned = self._before.get((home, name), MISSING) is not value
            return value if assigned else self._hold(name, value, *_steps_to(home, name))
        if isinstance(member, functools.cached_property):
            self._require_none_of_its_own(name)
            return member.func(self.value)  # the result is not cached: the object stays unchanged
        try:
            value = plain(self.value, name)
        except AttributeError:
            self._absent(name)
            raise
        if member is not MISSING and hasattr(type(member), "__get__"):
            self._method(name, member)
            if isinstance(member, types.FunctionType) and member in REPLACED_METHODS:
                return types.MethodType(REPLACED_METHODS[member], self.value)
            return value
        # An attribute of the class, or one made by a user's __getattribute__.
        return self._hold(name, value, f".{name}")

    def read_all(self) -> None:
        """Guard all attributes of the object, since its ``__dict__`` was read."""
        names = [name for home, name in self._before if home == _DICT]
        self._guards.add(KeysAre(self.source.attribute("__dict__"), names))
        for home, name in self._before:
            if home != _SLOT:
                self._hold(name, self._before[home, name], *_steps_to(home, name), exactly=True)

    @property
    def _guards(self) -> ClosureGuards:
        return self._builder.guards_of(self.source.in_closure)

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
        """True if an attribute was assigned the value that it had, which no guard holds."""
        is_guarded = name in self._held and (self.source.in_closure or not has_tensor(value))
        return name in self.lines and not is_guarded

    def _hold(self, name: str, value: Any, *steps: str, exactly: bool = False) -> Any:
        """Guard the value of an attribute, once; return it as the function sees it.

        Args:
            steps: the Python expressions of the steps to it.
            exactly: True if a number is guarded by its value even if it varies.
        """
        builder = self._builder
        numbers = builder.numbers
        if name not in self._held and not is_of_active_level(value):
            self._held.add(name)
            if self.source.in_closure and not name.startswith("_"):
                self._builder.refuse_closure_value(
                    f"{self.source.text}.{name}", str(user_location())
                )
            text, owner = f"{self.source.text}.{name}", f"{type(self.value).__name__}.{name}"
            with self._paused():
                self.check(name, value, f"read at {user_location()}")
                source = self.source
                for step in steps:
                    source = source.at("{}" + step, text, owner)
                if not exactly and numbers.is_input(value, text):
                    numbers.add(value, source, self._guards)
                    self._inputs[name] = value, source, functools.partial(numbers.symbol_of, text)
                elif not exactly and type(value) is tuple and numbers.are_inputs(value, text):
                    self._inputs[name] = value, source, builder.tuple_of_numbers(value, source)
                else:
                    builder.guard(value, source)
        read, source, symbolic = self._inputs.get(name, (MISSING, self.source, None))
        if symbolic is not None and value is read and name not in self.lines:
            if not exactly:
                return symbolic()
            self._guards.add(SameContents(source, value))
        return value

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
                f"specialize({self._builder.name}): {owner}, {use}, violates the annotation "
                f"of its class:\n{listed}Assign a value of the annotated type, or change the "
                f"annotation."
            )

    def _method(self, name: str, member: Any) -> None:
        """Guard a method: its class still has it, and the object has no attribute of that name."""
        if name in self._held:
            return
        self._require_none_of_its_own(name)
        cls = type(self.value)
        if isinstance(member, types.FunctionType) and (member.__module__ or "").startswith(
            "torch."
        ):
            base = next(base for base in cls.__mro__ if name in vars(base))
            self._guards.add(MemberIs(base, name, member))
        elif isinstance(member, types.FunctionType):
            self._guards.add(SameObject(Source.of_object(cls).attribute(name), member))
        elif not isinstance(member, _OF_C):
            self._require_in_class(name, member)
        self._met(member)

    def _descriptor(self, name: str, descriptor: Any) -> None:
        """Guard a property: its class still has it."""
        if name not in self._held:
            self._held.add(name)
            self._require_in_class(name, descriptor)
        self._watch_descriptor(name, descriptor)

    def _watch_descriptor(self, name: str, descriptor: Any) -> None:
        """Watch a descriptor of a user's class: its methods may read its attributes."""
        builder = self._builder
        if (
            not hasattr(type(descriptor), "__get__")
            or not is_watched(descriptor)
            or builder.source_of(descriptor) is not None
        ):
            return
        base = next(base for base in type(self.value).__mro__ if name in vars(base))
        source = Source.of_object(
            base, f"{base.__name__}.__dict__[{name!r}]", in_closure=self.source.in_closure
        )
        builder.guard(descriptor, source.at(f"{{}}.__dict__[{name!r}]"))

    def _require_in_class(self, name: str, descriptor: Any) -> None:
        """Guard the descriptor of an attribute in its class, unless it is in a class of torch."""
        base = next((base for base in type(self.value).__mro__ if name in vars(base)), None)
        if base is not None and not base.__module__.startswith("torch."):
            source = Source.of_object(base).at(f"{{}}.__dict__[{name!r}]")
            self._guards.add(SameObject(source, descriptor))

    def _require_none_of_its_own(self, name: str) -> None:
        """Guard that the object has no attribute of this name, which would hide the class's."""
        if name not in self._held and any(
            "__dict__" in vars(cls) for cls in type(self.value).__mro__
        ):
            namespace = self.source.attribute("__dict__")
            self._guards.add(Missing(namespace, name, IN_DICT))
        self._held.add(name)

    def _absent(self, name: str) -> None:
        """Guard that an attribute is missing; a user's ``__getattr__`` runs and may make it."""
        is_computed = hasattr(type(self.value), "__getattr__")
        if is_computed and not isinstance(self.value, torch.nn.Module):
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
    namespace = _dict_of(value)
    attributes = {(_DICT, name): member for name, member in namespace.items()}
    for kind in STATE if isinstance(value, torch.nn.Module) else ():
        attributes.update(
            {(kind, name): member for name, member in (namespace.get(kind) or {}).items()}
        )
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    attributes[_SLOT, name] = slot.__get__(value)
                except AttributeError:  # not assigned
                    continue
    return attributes


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        namespace: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has only slots
        return {}
    return namespace


def _find(value: Any, name: str) -> tuple[str | None, Any]:
    """Return the location of an attribute in the object itself, and its value."""
    namespace = _dict_of(value)
    if name in namespace:
        return _DICT, namespace[name]
    if isinstance(value, torch.nn.Module):
        for kind in STATE:
            state = namespace.get(kind) or {}
            if name in state:
                return kind, state[name]
    return None, None


def _steps_to(home: str, name: str) -> tuple[str, ...]:
    """Return the steps to an attribute, which bypass torch's slow lookup of parameters."""
    return (f".{home}", f"[{name!r}]") if home in STATE else (f".{name}",)


def _restore(value: Any, home: str, name: str, before: Any) -> None:
    if home == _SLOT:
        slot = inspect.getattr_static(type(value), name)
        slot.__delete__(value) if before is MISSING else slot.__set__(value, before)
        return
    namespace = _dict_of(value)
    state = namespace if home == _DICT else namespace[home]
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
