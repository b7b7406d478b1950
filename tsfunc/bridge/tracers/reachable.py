"""Finds the tensors that code can reach from the objects that it is given.

NOTE [reachable tensors]
The search follows the contents of objects as Python's garbage collector sees them: elements,
attributes, slots, cells, the arguments of a ``partial``, the variables of a suspended generator. A
tensor reaches its gradient and the tensors among its attributes: other attributes, such as those of
a tracer or a fake tensor, lead to the state of a trace. Namespaces of modules are not followed as a
whole, because the whole process can be reached from them. A function reaches the globals that its
code names, and the modules among these reach the variables that the code names. A class reaches its
variables and those of its methods that any code names. The code of libraries is not followed, but
the contents of their objects are: NOTE [code of libraries] in ``user_code.py``. No code of the user
runs during the search.

The parameters and buffers of a module are told apart from other tensors, because
``functional_call`` replaces them while it runs.

A search for the tensors that code reads (``only_named``) is made at every call of a function with
custom rules, and must not depend on the size of the user's data. The search follows only those
attributes of an object that some code names, and nothing that a tensor holds. A module reaches its
parameters, buffers and submodules without a name.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import importlib.util
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass

from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.dispatch import Level
from tsfunc.user_code import is_installed

_IMPORT_NAME: Final = dis.opmap["IMPORT_NAME"]
_HEAP_TYPE: Final = 1 << 9  # of CPython's type flags
# Objects of these classes hold no tensors.
_LEAF_CLASSES: Final = frozenset({
    str, bytes, int, float, complex, bool, type(None), type(Ellipsis), types.CodeType,
    torch.Size, torch.dtype, torch.device, torch.layout,
})  # fmt: skip
# Levels refer to the code that runs at them. Frames and tracebacks lead to callers.
_NOT_FOLLOWED: Final = (types.ModuleType, types.TracebackType, Level)
_CONTAINERS: Final[frozenset[type]] = frozenset({
    tuple, list, dict, OrderedDict, set, frozenset, types.CellType,
})  # fmt: skip
_METHODS: Final = (
    types.FunctionType, classmethod, staticmethod, property, functools.cached_property,
)  # fmt: skip


@dataclass(frozen=True)
class ModuleEntry:
    """A parameter or buffer of a module.

    Attributes:
        kind: the attribute of the module that has the entry: "_parameters" or "_buffers".
        name: the name of the parameter or buffer.
    """

    module: torch.nn.Module
    kind: str
    name: str
    tensor: torch.Tensor


class Reachable:
    """The tensors that code can reach from some objects.

    The order of the results depends on the code and the objects alone.

    Args:
        only_named: if True, only attributes that code names are followed, and no tensor is.

    Attributes:
        tensors: the tensors and tracers, with the values that tracers wrap and the gradients of
            tensors, but without those that are only reached as entries of modules.
        entries: the parameters and buffers of the modules.
    """

    def __init__(self, roots: Iterable[Any], *, only_named: bool = False) -> None:
        self._only_named = only_named
        self.tensors: list[torch.Tensor] = []
        self.entries: list[ModuleEntry] = []
        # The objects met, by id; they are kept alive, so that an id is not used twice.
        self._met: dict[int, Any] = {id(vars(builtins)): None}
        self._names: set[str] = set()
        # Methods and attributes that no code has named yet, by name.
        self._unnamed: dict[str, list[Any]] = {}
        self._search(list(roots))

    def _search(self, stack: list[Any]) -> None:
        met = self._met
        while stack:
            value = stack.pop()
            kind = type(value)  # not ``isinstance``, which may call code of the user
            if kind in _LEAF_CLASSES or (kind in _CONTAINERS and not value) or id(value) in met:
                continue
            met[id(value)] = value
            if kind in _CONTAINERS:
                if kind is not dict or "__builtins__" not in value:  # not the namespace of a module
                    stack += gc.get_referents(value)
            elif issubclass(kind, torch.Tensor):
                self.tensors.append(value)
                if not self._only_named:
                    stack.extend(_of_tensor(value))
            elif kind is types.FunctionType:
                stack.extend(self._of_function(value))
            elif issubclass(kind, type):
                stack.extend(self._of_class(value))
            elif not issubclass(kind, _NOT_FOLLOWED):
                if issubclass(kind, torch.nn.Module):
                    stack.extend(self._of_entries(value))
                if self._only_named and (attributes := _attributes_of(value)):
                    stack.extend(self._of_attributes(attributes))
                else:
                    stack.extend(_contents_of(value, kind))

    def _of_attributes(self, attributes: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the attributes that code names, and keep the others for a later name."""
        for name, value in [*attributes.items()]:
            if name in self._names or isinstance(attributes.get("__wrapped__"), _METHODS):
                yield value
            else:
                self._unnamed.setdefault(name, []).append(value)

    def _of_entries(self, module: torch.nn.Module) -> Iterator[Any]:
        """Note the entries of a module; yield its submodules and its tensors' attributes."""
        yield vars(module).get("_modules")  # the code of ``nn.Module`` reads it, which is not read
        for kind in ("_parameters", "_buffers"):
            entries = vars(module).get(kind)
            if type(entries) is dict:
                self._met[id(entries)] = entries
                for name, tensor in entries.items():
                    if isinstance(tensor, torch.Tensor):
                        self.entries.append(ModuleEntry(module, kind, name, tensor))
                        # The value inside of a tracer belongs to the entry too.
                        if not self._only_named and not isinstance(tensor, Tracer):
                            yield from _of_tensor(tensor)

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        yield function.__dict__
        held = held_by(function)
        yield from held
        if is_installed(function):
            return
        names = names_in_code(function.__code__)
        for name in sorted(names - self._names):
            yield from self._unnamed.pop(name, ())
        self._names |= names
        space = function.__globals__
        values = [space[name] for name in sorted(names & space.keys())]
        yield from values
        imported = _imports(names, space) if has_import(function.__code__) else ()
        modules = _modules([*values, *held, *map(sys.modules.get, imported)])
        seen: set[int] = set()
        while modules:
            module = modules.pop()
            if id(module) not in seen and not is_installed(module):
                seen.add(id(module))
                inner = vars(module)
                values = [inner[name] for name in sorted(names & inner.keys())]
                yield from values
                modules += _modules(values)

    def _of_class(self, cls: type) -> Iterator[Any]:
        if not cls.__flags__ & _HEAP_TYPE or is_installed(cls):
            return
        yield from cls.__bases__
        yield type(cls)
        for name, value in [*vars(cls).items()]:
            special = name.startswith("__") and name.endswith("__")
            if not isinstance(value, _METHODS):
                if not special:
                    yield value
            elif special or name in self._names:
                yield value
            else:
                self._unnamed.setdefault(name, []).append(value)


def _modules(values: Iterable[Any]) -> list[types.ModuleType]:
    return [value for value in values if isinstance(value, types.ModuleType)]


def _imports(names: Iterable[str], space: dict[str, Any]) -> Iterator[str]:
    """Yield the modules that code may import by these names, absolutely or relatively."""
    package = space.get("__package__")
    for name in sorted(names):
        yield name
        if isinstance(package, str) and package:
            with suppress(ImportError, ValueError):
                yield importlib.util.resolve_name(f".{name}", package)


@functools.lru_cache(maxsize=4096)
def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals, attributes and modules in a function's code and nested code."""
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*map(names_in_code, nested))


@functools.lru_cache(maxsize=4096)
def has_import(code: types.CodeType) -> bool:
    """True if a function's code, or nested code, has an import statement."""
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return _IMPORT_NAME in code.co_code[::2] or any(map(has_import, nested))


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the ``.grad`` of a tensor, whatever state the tensor is in."""
    with DisableTorchFunctionSubclass():
        if tensor.retains_grad:
            return tensor.grad
        # Autograd refuses to say if some views are leaves: those made under no_grad whose base was
        # written to with a graph later. They have no gradient.
        with suppress(RuntimeError):
            return tensor.grad if tensor.is_leaf else None
    return None


# --- the contents of objects


def held_by(value: Any) -> Iterable[Any]:
    """Return the objects that an object holds; for a function, its closure and its defaults."""
    if type(value) is not types.FunctionType:
        return _contents_of(value, type(value))
    cells = gc.get_referents(*(value.__closure__ or ()))
    return [*cells, value.__defaults__, value.__kwdefaults__]


def _contents_of(value: Any, kind: type) -> Iterable[Any]:
    """Return the objects that an object of a class holds."""
    for base, contents in _UNSEEN_BY_COLLECTOR:
        if issubclass(kind, base):
            return contents(value)
    return gc.get_referents(value)


def _attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes in an object's ``__dict__``; none for an object without one."""
    if isinstance(value, (functools.partial, torch.jit.ScriptModule)):
        return {}  # its arguments, or its parameters, are not among them
    with suppress(AttributeError):
        attributes = object.__getattribute__(value, "__dict__")
        return attributes if isinstance(attributes, dict) else {}
    return {}


def _of_tensor(tensor: torch.Tensor) -> Iterable[Any]:
    """Return the tensors among the attributes of a tensor, and its gradient."""
    referents = gc.get_referents(tensor)
    referents += [each for space in referents if type(space) is dict for each in space.values()]
    return [
        *(each for each in referents if issubclass(type(each), torch.Tensor)),
        gradient_of(tensor),
    ]


def _of_frame(frame: types.FrameType) -> Iterable[Any]:
    return [
        referent
        for referent in gc.get_referents(frame)
        if not isinstance(referent, types.FrameType)
    ]


def _of_array(array: Any) -> Iterable[Any]:
    return array.flat if array.dtype.hasobject else ()


def _of_script_module(module: Any) -> Iterable[Any]:
    return [*gc.get_referents(module), *module.parameters(), *module.buffers()]


# Contents that Python's garbage collector does not see, or that lead to callers, by class.
_UNSEEN_BY_COLLECTOR: Final[list[tuple[type, Callable[[Any], Iterable[Any]]]]] = [
    (weakref.ReferenceType, lambda reference: (reference(),)),
    (ContextVar, lambda variable: (variable.get(None),)),
    (threading.local, lambda local: vars(local).values()),
    (torch.jit.ScriptModule, _of_script_module),
    (types.FrameType, _of_frame),
]
with suppress(ImportError):
    import numpy

    _UNSEEN_BY_COLLECTOR.append((numpy.ndarray, _of_array))
