"""Module buffers that a function under vmap assigns a batched tensor to.

NOTE [assigned buffers]
``self.count = self.count + x.sum()`` puts a batched tensor into a module. During the call the
buffer is read like any other value, and ``functional_call`` restores the previous buffer. A module
that was made outside of the function has one buffer for all examples, so after the call it would
hold a tracer of a transform that has ended. The level therefore restores the module's buffer and
refuses the call, as it refuses an in-place write to such a buffer. torch's buffer registration
hook reports each assignment; programs, which assign without the hook, call :func:`note_assigned`
themselves. Calls that assign no buffer pay nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.writing.creation_tracking import created_in
from tsfunc.bridge.writing.naming import Described
from tsfunc.dispatch.places import source_of, users_place
from tsfunc.errors import EscapedTracerError


@dataclass(frozen=True)
class _Assigned:
    """A buffer that was assigned a batched tensor, where the old value was not of the same level.

    Attributes:
        module: weak reference to the module that owns the buffer.
        name: the buffer's name.
        before: the buffer's previous value.
        level: the level of the batched tensor.
        what: the error text: which buffer was assigned, and where.
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    before: torch.Tensor | None
    level: BatchLevel
    what: str

    @property
    def is_kept(self) -> bool:
        """True if the module's buffer still holds a tensor of the level."""
        module = self.module()
        value = None if module is None else module._buffers.get(self.name)
        return _level_of(value) is self.level

    def put_back(self) -> None:
        """Restore the module's previous buffer."""
        module = self.module()
        if module is not None:
            module._buffers[self.name] = self.before


ASSIGNED: Final[list[_Assigned]] = []
"""The buffers that have been assigned in calls which are running."""


def _level_of(value: Any) -> BatchLevel | None:
    level = value.dispatch_level.root if isinstance(value, BatchTracer) else None
    return level if isinstance(level, BatchLevel) else None


def note_assigned(module: Any, name: str, value: Any) -> None:
    """Record an assigned batched buffer; torch and programs call this before each assignment."""
    level = _level_of(value)
    if level is None or not level.alive or not isinstance(module, torch.nn.Module):
        return
    before = module._buffers.get(name)
    if _level_of(before) is level:
        return
    if before is None or id(before) not in created_in(level):
        place = users_place()
        named = f"the buffer {name!r}" if before is None else Described(before)
        what = f"{named} is assigned values that differ between examples, at {place}"
        what += source_of(place, ": ")
        ASSIGNED.append(_Assigned(weakref.ref(module), name, before, level, what))


register_module_buffer_registration_hook(note_assigned)


def put_back_assigned(level: BatchLevel) -> _Assigned | None:
    """Restore the buffers of a level when its call ends; return the first still batched."""
    own = [each for each in ASSIGNED if each.level is level]
    kept = [each for each in own if each.is_kept]
    ASSIGNED[:] = [each for each in ASSIGNED if each.level is not level]
    for each in kept:
        each.put_back()
    return kept[0] if kept else None


def refuse_assigned(level: BatchLevel) -> None:
    """Raise if the call left a batched tensor in the buffer of a module from outside.

    Raises:
        EscapedTracerError: a buffer still holds a tensor of the level.
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
