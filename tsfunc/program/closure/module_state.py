"""Names of the tensors that a program reads from outside, as a module names them.

A program of a module reads its parameters and buffers, and may assign buffers. torch's tools use
the names of ``state_dict()`` for them. For another function the names follow the user's spelling
of the tensors: ``model.fc.weight``, ``params['w']``.
"""

from __future__ import annotations

import copy
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tsfunc.program.closure.updates import Update


@dataclass(frozen=True)
class ModuleState:
    """The names of the tensors that a program reads from outside.

    Attributes:
        module: the module that was traced; None for another function.
        names: the names of the lifted tensors, keyed by their names in the program.
        inputs: the names of the tensors that each call replaces, keyed by their index in the list
            that the program is called with.
        assigned: the names of the buffers that updates assign, keyed by the updates' indices.
        attributes: the names of lifted tensors that are attributes of the module or a submodule,
            but not parameters or buffers.
    """

    module: torch.nn.Module | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[int, str] = field(default_factory=dict)
    assigned: Mapping[int, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        module = copy.deepcopy(self.module, memo)
        return replace(self, module=module)


def state_of(
    func: Callable[..., Any],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update],
    first: int,
    values: Sequence[Any],
    read: Mapping[str, Any],
) -> ModuleState:
    """Return the names of the tensors that a program reads.

    Args:
        func: the traced function or module.
        lifted: the tensors from outside that the program reads, keyed by their names in it.
        updates: its assignments.
        first: the number of flattened arguments.
        values: the values that the program is called with after the arguments.
        read: the values that the trace has read, keyed by the user's spelling.
    """
    module = func if isinstance(func, torch.nn.Module) else getattr(func, "__self__", None)
    if not isinstance(module, torch.nn.Module):
        known = {id(x): _dotted(text) for text, x in read.items() if isinstance(x, torch.Tensor)}
        return ModuleState(None, _named(lifted, known))
    tensors = dict(_state(module))
    inputs = {first + i: tensors[id(x)] for i, x in enumerate(values) if id(x) in tensors}
    prefixes: dict[int, str] = {}
    for name, each in module.named_modules():
        prefixes[id(each)] = f"{name}." if name else ""
    assigned = {}
    for i, update in enumerate(updates):
        owner = values[update.owner - first]
        if update.buffer is not None and id(owner) in prefixes:
            assigned[i] = prefixes[id(owner)] + update.buffer
    own = {
        id(value): prefixes[id(each)] + name
        for each in module.modules()
        for name, value in vars(each).items()
        if isinstance(value, torch.Tensor) and id(value) not in tensors
    }
    return ModuleState(module, _named(lifted, tensors), inputs, assigned, _named(lifted, own))


def names_in_source(
    func: Callable[..., Any],
    lifted: Mapping[str, torch.Tensor],
    read: Mapping[str, Any],
    taken: Collection[str],
) -> dict[str, str]:
    """Return for each lifted tensor with a name of the user's an identifier made of that name.

    Args:
        func, lifted, read: as for :func:`state_of`.
        taken: other names in the program.
    """
    state = state_of(func, lifted, (), 0, (), read)
    used = {*taken, *lifted, *keyword.kwlist}
    found = {}
    for name, text in {**state.attributes, **state.names}.items():
        plain = re.sub(r"\._(modules|parameters|buffers)\b", "", text)
        base = re.sub(r"\W+", "_", plain)
        base = chosen = base if base.isidentifier() else f"_{base}"
        i = 1
        while chosen in used:
            i += 1
            chosen = f"{base}_{i}"
        used.add(chosen)
        found[name] = chosen
    return found


def _state(module: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Return each parameter and buffer by its id; the first name of several counts."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return ((id(tensor), name) for name, tensor in named)


def _named(lifted: Mapping[str, torch.Tensor], known: Mapping[int, str]) -> dict[str, str]:
    return {name: known[id(x)] for name, x in lifted.items() if id(x) in known}


def _dotted(text: str) -> str:
    """Return the dotted name of a spelling: ``params['w'][0]`` becomes ``params.w.0``."""
    name = re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", text)
    return re.sub(r"[^\w.]+|(?<=\.)\.+", "_", name).strip(".")
