"""Buffers of modules that a mapped function assigns.

NOTE [assigned buffers]
``self.count = self.count + x.sum()`` puts a batched tensor into a module. Within the call it is
read as any value, and ``functional_call`` puts back what was there. What a module from outside has
when the call ends would be a tensor of a transform that is over: there is one buffer for all
examples, as there is where one is written into. So the module gets back what it had, and the call
is refused. torch itself tells of the assignment, and programs do, which assign past it; calls that
assign no buffer pay nothing for it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.writing.births import born_inside
from tsfunc.bridge.writing.naming import Described
from tsfunc.dispatch.places import source_of, users_place
from tsfunc.errors import EscapedTracerError


@dataclass(frozen=True)
class _Assigned:
    """A buffer that was assigned a batched tensor where it had none of the same level.

    Attributes:
        module: whose buffer it is.
        name: the buffer's.
        before: what it was.
        level: that of the batched tensor.
        what: how an error speaks of it, and where it was assigned.
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    before: torch.Tensor | None
    level: BatchLevel
    what: str

    @property
    def is_kept(self) -> bool:
        """Whether the module has a tensor of the level now."""
        module = self.module()
        value = None if module is None else module._buffers.get(self.name)
        return _level_of(value) is self.level

    def put_back(self) -> None:
        """Gives the module the buffer again that it had."""
        module = self.module()
        if module is not None:
            module._buffers[self.name] = self.before


ASSIGNED: Final[list[_Assigned]] = []
"""The buffers that have been assigned in calls which are running."""


def _level_of(value: Any) -> BatchLevel | None:
    level = value.dispatch_level.root if isinstance(value, BatchTracer) else None
    return level if isinstance(level, BatchLevel) else None


def note_assigned(module: Any, name: str, value: Any) -> None:
    """Is told of every buffer that is assigned, before it is, by torch and by programs."""
    level = _level_of(value)
    if level is None or not level.alive or not isinstance(module, torch.nn.Module):
        return
    before = module._buffers.get(name)
    if _level_of(before) is level:
        return
    if before is None or id(before) not in born_inside(level):
        place = users_place()
        named = f"the buffer {name!r}" if before is None else Described(before)
        what = f"{named} is assigned values that differ between examples, at {place}"
        what += source_of(place, ": ")
        ASSIGNED.append(_Assigned(weakref.ref(module), name, before, level, what))


register_module_buffer_registration_hook(note_assigned)


def put_back_assigned(level: BatchLevel) -> _Assigned | None:
    """Gives modules their buffers again, at the end of a call; the first that was not as before."""
    own = [each for each in ASSIGNED if each.level is level]
    kept = [each for each in own if each.is_kept]
    ASSIGNED[:] = [each for each in ASSIGNED if each.level is not level]
    for each in kept:
        each.put_back()
    return kept[0] if kept else None


def refuse_assigned(level: BatchLevel) -> None:
    """Raises where a module from outside was left with a batched buffer.

    Raises:
        EscapedTracerError: one was.
    """
    found = put_back_assigned(level)
    if found is not None:
        raise EscapedTracerError(
            f"{level.name}: {found.what}\nThe module was made outside of the function: it has one "
            f"buffer for all examples. Give its state as an argument and return what it becomes:\n"
            f"{_REWRITE}"
        )


_REWRITE = """
    def call(buffers, x):
        state = {**dict(model.named_parameters()), **buffers}
        out = tsfunc.functional_call(model, state, x)
        return out, {name: state[name] for name in buffers}

    out, buffers = tsfunc.vmap(call, in_dims=(None, 0))(dict(model.named_buffers()), x)
"""
