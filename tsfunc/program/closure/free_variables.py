"""Reads of a function beyond its arguments: variables, defaults, modules, classes.

The function's own code is scanned, and so are the functions, methods and classes that it refers
to, except those of libraries: NOTE [code of libraries] in ``user_code.py``. Further code is
scanned when the trace meets it (an attribute that is a function, a method of an object). Numbers
and strings are guarded by value, containers by their elements, tensors and all other objects by
identity. The program reads a tensor's data at every call, so later writes to the tensor have
effect. NOTE [attributes] in ``guard_builder.py`` describes the guards on attributes of objects.
"""

from __future__ import annotations

import abc
import builtins
import copy
import enum
import functools
import importlib.util
import inspect
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.dispatch import Operator
from tsfunc.program.closure.closure_guards import (
    IN_DICT,
    MemberIs,
    Missing,
    NoMember,
    ResultIs,
    SameObject,
)
from tsfunc.program.closure.code_reads import Access, LibraryReads, code_reads
from tsfunc.program.closure.guard_builder import ContainerSnapshot, is_watched, restore
from tsfunc.program.closure.instances import REPLACED_METHODS, Instances
from tsfunc.program.closure.side_effects import (
    CODE,
    MISSING,
    SideEffect,
    Variable,
    bases_of,
    is_empty,
    is_followed,
)
from tsfunc.program.guard import Source
from tsfunc.user_code import is_installed

_kernels_of = operator.attrgetter("kernels")
_METHODS = (types.FunctionType, property, functools.cached_property)
_PLAIN = (int, float, bool, str, type(None))
_DESCRIPTIONS = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})
_FILLED = (list, dict, set, deque)
_NO_TENSORS = (*CODE, *_PLAIN, torch.dtype, torch.layout, torch.device, enum.Enum)


class FreeVariables:
    """Adds the reads of a function from outside to the guards and watched objects of a trace.

    Args:
        every: True if variables that are only changed are included: NOTE [counters] in
            ``code_reads.py``.
    """

    def __init__(self, instances: Instances, every: bool = False) -> None:
        self.instances, self.every = instances, every
        self.builder = instances.builder
        self.guards = instances.builder.guards_of(in_closure=True)
        self._seen: dict[int, Any] = {}
        self._variables: dict[tuple[int, str | None], Variable] = {}
        self._looks_at_registered = False
        self._libraries = LibraryReads(instances, self._guard_registrations)
        self._counters: list[tuple[Variable, Any]] = []
        self._names: set[str] = set()
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        instances.met = self.scan
        instances.others = self._changes
        instances.free_counters = self._free_counters
        instances.guard_unchanged = self._guard_unchanged

    def add(self, func: Any) -> None:
        """Add the specialized function itself."""
        with self.instances.paused():
            self._object("self", func)
            self.scan(func)

    # --- code

    def scan(self, code: Any) -> None:
        """Scan a callable, or a class, that the function uses."""
        if id(code) in self._seen:
            return
        self._seen[id(code)] = code
        with self.instances.paused():
            if isinstance(code, types.FunctionType):
                self._function(code)
            elif isinstance(code, type):
                self._guard_registrations(code)
                self._class(code)
                self._class(type(code))
            elif isinstance(code, types.ModuleType):
                self._module(code)
            elif isinstance(code, functools.partial):
                self._partial(code)
            elif isinstance(code, types.MethodType):
                self._object("self", code.__self__)
                self.scan(code.__func__)
            elif isinstance(code, Operator):
                self._operator(code)
            elif is_watched(code):
                # An object that is reached from a variable already has a source.
                self._object(type(code).__name__, code)
                called = "forward" if isinstance(code, torch.nn.Module) else "__call__"
                self.scan(inspect.getattr_static(type(code), called, None))
            else:
                for name in ("__wrapped__", "func", "__func__", "fget"):
                    inner = getattr(code, name, None)
                    if callable(inner):
                        self.scan(inner)
                # A function that was loaded from a file has no code: it names the state that it
                # assigns.
                for text, state in getattr(code, "__assigned_state__", {}).items():
                    self._value(Source.of_object(state, text), state)

    def _operator(self, op: Operator) -> None:
        """Guard the kernels of a user's operator, of which a trace runs those of the backend."""
        kernels = op.kernels
        name = f"the table of kernels of {op.name}"
        self.guards.add(ResultIs(_kernels_of, (Source.of_object(op),), kernels, name))
        for kernel in kernels:
            self.scan(kernel)

    def _function(self, func: types.FunctionType) -> None:
        inner = getattr(func, "__wrapped__", None)
        if callable(inner):
            self.scan(inner)
        if is_installed(func):
            self._scan_wrapped(func)
            return
        self.guards.add(SameObject(Source.of_object(func).attribute("__code__"), func.__code__))
        self._defaults(func)
        scanned = code_reads(func.__code__)
        # NOTE [counters] in ``code_reads.py``: a variable that is only changed counts if read too.
        looked_at = {
            (read.kind, read.name)
            for read in scanned.reads
            if self.every or not read.only_changes or self._has_methods(func, read)
        }
        for access in scanned.writes:
            if not access.only_changes or (access.kind, access.name) in looked_at:
                self._follow(func, access, writes=True)
        for access in scanned.reads:
            if (access.kind, access.name) in looked_at:
                self._follow(func, access)
                path = access.attributes  # a name in `__dict__` is an attribute of its owner
                path = path[: path.index("__dict__")] if "__dict__" in path else path
                for text in scanned.texts - {*path}:
                    self._follow(func, replace(access, attributes=(*path, text)))
            else:
                self._count(func, access)
        if any(self._may_hold_tensor(func, access) for access in scanned.compared):
            self.instances.compares_identity = True
        for text in scanned.texts & func.__globals__.keys():
            self._follow(func, Access("global", text, (), func.__code__.co_firstlineno))
        for name in scanned.names - self._names:
            self._names.add(name)
            for visit in self._waiting.pop(name, ()):
                visit()

    def _scan_wrapped(self, func: types.FunctionType) -> None:
        """Scan the functions that a library's function closes over (one that ``vmap`` returns)."""
        for cell in func.__closure__ or ():
            inner = Variable(cell, None, "", "").before
            if inner is not MISSING and callable(inner):
                self.scan(inner)

    def _defaults(self, func: types.FunctionType) -> None:
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(func, name)
            if value:
                source = Source.of_object(func, f"{func.__name__}.{name}").attribute(name)
                if isinstance(value, tuple) and all(type(item) in _PLAIN for item in value):
                    self.guards.add(SameObject(source, value))
                else:
                    self._value(source, value)

    def _partial(self, func: functools.partial[Any]) -> None:
        for name in ("args", "keywords"):
            value = getattr(func, name)
            if value:
                self._value(Source.of_object(func, f"partial.{name}").attribute(name), value)
        self.scan(func.func)

    def _class(self, cls: type) -> None:
        """Look at the methods and attributes of a class that the function's code names."""
        derived: list[type] = []  # the classes that override an attribute if they have it
        for base in cls.__mro__:
            if is_installed(base):
                continue
            for name, value in list(vars(base).items()):
                visit = functools.partial(self._member, base, name, value, tuple(derived))
                if name.startswith("__") and name.endswith("__"):
                    visit()
                else:
                    self._when_name_occurs(name, visit)
            derived.append(base)

    def _module(self, module: types.ModuleType) -> None:
        """Look at the variables of a module whose names the code uses as attribute names."""
        if not is_installed(module):
            for name in list(vars(module)):
                if not (name.startswith("__") and name.endswith("__")):
                    text = f"{module.__name__}.{name}"
                    self._when_name_occurs(name, functools.partial(self._find, module, name, text))

    def _find(self, owner: Any, name: str, text: str) -> None:
        """Guard a variable that the code may read, judged by its name."""
        self._guard_variable(self._variable(owner, name, text, ""))

    def _when_name_occurs(self, name: str, visit: Callable[[], None]) -> None:
        """Call ``visit`` now if the name occurs in the function's code, else when it does."""
        if name in self._names:
            visit()
        else:
            self._waiting.setdefault(name, []).append(visit)

    def _guard_registrations(self, cls: type) -> None:
        """Guard the registrations of abstract classes, on which ``isinstance`` depends."""
        if isinstance(cls, abc.ABCMeta) and not self._looks_at_registered:
            self._looks_at_registered = True
            name = "the number of registrations in abstract classes"
            self.guards.add(ResultIs(abc.get_cache_token, (), abc.get_cache_token(), name))

    def _member(self, cls: type, name: str, value: Any, derived: Sequence[type]) -> None:
        """Guard an attribute of a class, and that no derived class overrides it.

        A dunder name is guarded only if it is a method.
        """
        if isinstance(value, _METHODS) or not name.startswith("__"):
            for each in derived:
                if name not in vars(each):
                    self.guards.add(NoMember(each, name))
        if isinstance(value, _METHODS) and name not in REPLACED_METHODS:
            self.guards.add(MemberIs(cls, name, value))
        for attribute in ("fget", "func", "__func__"):  # of properties and other wrappers
            value = getattr(value, attribute, None) or value
        if isinstance(value, types.FunctionType):
            self.scan(value)
        elif not name.startswith("__") and not hasattr(type(value), "__get__"):
            self._find(cls, name, f"{cls.__name__}.{name}")

    # --- variables

    def _follow(self, func: types.FunctionType, access: Access, writes: bool = False) -> None:
        """Read a variable, and the attributes that the code reads from it."""
        line = f"{func.__code__.co_filename}:{access.line}, in {func.__code__.co_name}"
        root = _root(func, access)
        if root is None:
            if access.kind == "module":
                self._libraries.guard_member(_imported_module(func, access), access.attributes)
            return
        owner, name, text, attributes = root
        for i, attribute in enumerate((*attributes, None)):
            variable = self._variable(owner, name, text, line)
            if writes and attribute is None:
                variable.is_written = True
                return
            self._guard_variable(variable)
            self._libraries.visit(owner, name, variable.before, attributes[i:], line, access.bare)
            owner, name = variable.before, attribute
            if name is None:
                return
            self._of_object(owner, name, f"{text}.{name}")
            if not is_followed(owner, name):
                return
            text = f"{text}.{name}"

    def _may_hold_tensor(self, func: types.FunctionType, access: Access | None) -> bool:
        """True if the object of an identity comparison may be a tensor."""
        root = None if access is None else _root(func, access)
        if root is None:
            return True
        owner, name, text, attributes = root
        value = Variable(owner, name, text, "").before
        if value is MISSING:
            value = vars(builtins).get(str(name))
        for attribute in attributes:
            value = inspect.getattr_static(value, attribute, None)
        return isinstance(value, torch.Tensor) or not isinstance(value, _NO_TENSORS)

    def _has_methods(self, func: types.FunctionType, access: Access) -> bool:
        """True if a variable holds an object of a class with methods of its own."""
        root = _root(func, access)
        if root is None:
            return False
        owner, name, text, attributes = root
        value = Variable(owner, name, text, "").before
        for attribute in attributes:
            value = inspect.getattr_static(value, attribute, None)
        return value is not MISSING and is_watched(value)

    def _count(self, func: types.FunctionType, access: Access) -> None:
        """Keep the value of a variable that the function only changes."""
        root = _root(func, access)
        if root is not None and not root[-1]:
            variable = Variable(*root[:3], line="")
            value = variable.before
            self._counters.append(
                (variable, copy.copy(value) if isinstance(value, _FILLED) else None)
            )

    def _free_counters(self) -> bool:
        """Remove traced tensors from variables that the function only changes.

        Returns:
            True if there were any.
        """
        is_used = False
        for variable, elements in self._counters:
            value = variable.read()
            if isinstance(value, Tracer):
                variable.restore()
            elif elements is not None and _has_tracers(value):
                restore(ContainerSnapshot(value, elements, variable.source))
            else:
                continue
            is_used = True
        return is_used

    def _of_object(self, owner: Any, name: str, text: str) -> None:
        """Guard the names of functions and classes, and attributes that tensors lack."""
        if name in _DESCRIPTIONS and isinstance(owner, types.FunctionType | type):
            source = Source.of_object(owner, text).attribute(name)
            self.builder.guard(getattr(owner, name), source)
        elif isinstance(owner, torch.Tensor) and not hasattr(owner, name):
            self.guards.add(Missing(Source.of_object(owner), name))

    def _variable(self, owner: Any, name: str | None, text: str, line: str) -> Variable:
        key = id(owner), name
        if key not in self._variables:
            self._variables[key] = Variable(owner, name, text, line)
        variable = self._variables[key]
        variable.line = variable.line or line
        return variable

    def _guard_unchanged(self) -> None:
        """Guard the variables that may have been assigned the values that they had."""
        for variable in list(self._variables.values()):
            if variable.is_written and variable.read() is variable.before:
                self._guard(variable)

    def _guard_variable(self, variable: Variable) -> None:
        """Guard the value of a variable that the function reads."""
        value = variable.before
        if variable.line and value is not MISSING and not isinstance(value, CODE):
            self.builder.refuse_closure_value(variable.text, variable.line)
        self._guard(variable)

    def _guard(self, variable: Variable) -> None:
        """Guard the value of a variable, once."""
        value, source = variable.before, variable.source.at(variable.target)
        if variable.is_read:
            return
        variable.is_read = True
        if value is MISSING:
            self._absent(variable)
            return
        if isinstance(value, staticmethod | classmethod):
            source = source if isinstance(value, staticmethod) else source.attribute("__func__")
            value = value.__func__
        elif isinstance(variable.owner, type) and (
            isinstance(value, types.ClassMethodDescriptorType)  # each read makes a new bound method
            or (is_watched(value) and hasattr(value, "__get__"))
        ):
            base = next(base for base in bases_of(variable.owner) if variable.name in vars(base))
            source = Source.of_object(base, variable.text)
            source = source.at(f"{{}}.__dict__[{variable.name!r}]")
        if isinstance(value, type(os.environ)):
            self._libraries.guard_environment()
            return
        self._value(source, value)

    def _absent(self, variable: Variable) -> None:
        """Guard that a variable is missing; a new one would hide a builtin of the same name."""
        if isinstance(variable.owner, types.ModuleType):
            self.scan(vars(variable.owner).get("__getattr__"))
        name, source = variable.name, variable.source
        if name is None:
            self.guards.add(ResultIs(is_empty, (source,), True, f"{variable.text} is not assigned"))
        elif isinstance(variable.owner, dict):
            self.guards.add(Missing(source, name, IN_DICT))
        else:
            for base in bases_of(variable.owner):
                if base is not object:
                    self.guards.add(Missing(Source.of_object(base), name, "{1!r} in vars({0})"))

    def _value(self, source: Source, value: Any) -> None:
        if isinstance(value, CODE):
            self.guards.add(SameObject(replace(source, text=""), value))
            self.scan(value)
        elif is_watched(value):
            self.guards.add(SameObject(replace(source, text=""), value))
            self._object(source.text, value)
            self.builder.guard(value, source)  # an argument may be the same object
            self.scan(value)
        else:
            self.builder.guard(value, source)

    def _object(self, text: str, value: Any) -> None:
        if is_watched(value) and self.builder.source_of(value) is None:
            self.instances.add(value, Source.of_object(value, text, type(value).__name__))

    def _changes(self) -> Iterator[SideEffect]:
        """Yield the variables that the function has assigned."""
        for variable in self._variables.values():
            after = variable.read()
            if after is variable.before:
                continue
            yield SideEffect(
                variable.text, variable.source, variable.owner, variable.target, variable.before,
                after, undo=variable.restore, line=variable.line,
            )  # fmt: skip


def _has_tracers(container: Any) -> bool:
    """True if the elements of a container include a tracer."""
    items: Iterable[Any] = container.values() if isinstance(container, dict) else container
    return any(isinstance(leaf, Tracer) for leaf in pytrees.flatten(list(items))[0])


def _root(
    func: types.FunctionType, access: Access
) -> tuple[Any, str | None, str, tuple[str, ...]] | None:
    """Return the start of an access: the variable's owner and name, and the attributes.

    Returns:
        The owner, the name in the owner, the user's spelling, and the attributes after it; None if
        there is nothing to guard.
    """
    if access.kind == "global":
        return func.__globals__, access.name, access.name, access.attributes
    if access.kind == "free":
        cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
        return cells[access.name], None, access.name, access.attributes
    module, (first, *rest) = _imported_module(func, access), access.attributes
    if module is None or not is_followed(module, first):
        return None
    return module, first, f"{access.name}.{first}", tuple(rest)


def _imported_module(func: types.FunctionType, access: Access) -> types.ModuleType | None:
    """Return the module that a function imports, or None if it is not imported yet."""
    name = "." * access.level + access.name
    try:
        name = importlib.util.resolve_name(name, func.__globals__.get("__package__") or "")
    except ImportError:
        return None
    return sys.modules.get(name)
