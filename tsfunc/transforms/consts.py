"""The tensors that functions close over: NOTE [hidden operands] in ``bridge/tracers/substitution``.

The search covers the objects that the code can reach: variables of enclosing functions and globals
that the code names, defaults, the parts of ``functools.partial``, the objects of methods, and the
attributes that the code names. Only tensors with gradients or tangents, and tracers, are returned.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tsfunc.bridge.grad.autograd import is_perturbed
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.program.closure.code_reads import code_reads

_SKIPPED = (types.ModuleType, type, types.BuiltinFunctionType, str, bytes, int, float, complex)
_LIBRARIES = ("torch.", "tsfunc.", "numpy.", "functools.", "optree.")


def consts_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that functions and objects close over, each tensor once."""
    search = _Search()
    for value in values:
        search.look(value)
    return search.found


class _Search:
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.seen: set[int] = set()
        self.kept: list[Any] = []  # keeps objects alive, so that an id is not used twice
        self.names: set[str] = set()

    def look(self, value: Any) -> None:
        if value is None or isinstance(value, _SKIPPED) or id(value) in self.seen:
            return
        self.seen.add(id(value))
        self.kept.append(value)
        if isinstance(value, torch.Tensor):
            if isinstance(value, Tracer) or is_perturbed(as_seen_by_current_level(value)):
                self.found.append(value)
            return
        for part in self.parts(value):
            self.look(part)

    def parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, list | tuple | set | frozenset):
            return [*value]
        if isinstance(value, dict):
            return [*value.values()]
        if isinstance(value, functools.partial):
            return (value.func, value.args, value.keywords)
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__)
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        if isinstance(value, torch.nn.Module):
            return (*value.parameters(), *value.buffers())
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return ()
        if isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            return [*attributes.values()]  # a function with custom rules, or another wrapper
        return [part for name, part in attributes.items() if name in self.names]

    def of_function(self, function: types.FunctionType) -> Iterator[Any]:
        if f"{function.__module__}.".startswith(_LIBRARIES):
            return
        reads = code_reads(function.__code__)
        self.names |= reads.names
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield function.__defaults__
        yield function.__kwdefaults__
        for read in reads.reads:
            if read.kind == "global" and read.name in function.__globals__:
                yield function.__globals__[read.name]
