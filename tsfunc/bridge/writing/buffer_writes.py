"""Module buffers that a function under vmap assigns a batched tensor to.

NOTE [buffer writes]
``self.count = self.count + x.sum()`` puts a batched tensor into a module. During the call the
buffer is read like any other value, and ``functional_call`` restores the previous buffer. A module
that was made outside of the function has one buffer for all examples, so after the call it would
hold a tracer of a transform that has ended. The level therefore restores the module's buffer and
refuses the call, as it refuses an in-place write to such a buffer. torch's buffer registration
hook reports each assignment; programs, which assign without the hook, call
:func:`note_buffer_write` themselves. Calls that assign no buffer pay nothing.
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
class _BufferWrite:
    """A buffer that was assigned a batched tensor, where the old value was not of the same level.

    Attributes:
        module: weak reference to the module that owns the buffer.
        name: the buffer's name.
        before: the buffer's previous value.
        level: the level of the batched tensor.
        description: the error text: which buffer was assigned, and where.
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    before: torch.Tensor | None
    level: BatchLevel
    description: str

    @property
    def is_current(self) -> bool:
        """True if the module's buffer still holds a tensor of the level."""
        module = self.module()
        value = None if module is None else module._buffers.get(self.name)
        return _level_of(value) is self.level

    def restore(self) -> None:
        """Restore the module's previous buffer."""
        module = self.module()
        if module is not None:
            module._buffers[self.name] = self.before


BUFFER_WRITES: Final[list[_BufferWrite]] = []
"""The batched values assigned to buffers in calls that have not ended."""


def _level_of(value: Any) -> BatchLevel | None:
    level = value.dispatch_level.root if isinstance(value, BatchTracer) else None
    return level if isinstance(level, BatchLevel) else None


def note_buffer_write(module: Any, name: str, value: Any) -> None:
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
        text = f"{named} is assigned values that differ between examples, at {place}"
        text += source_of(place, ": ")
        BUFFER_WRITES.append(_BufferWrite(weakref.ref(module), name, before, level, text))


register_module_buffer_registration_hook(note_buffer_write)


def restore_buffers(level: BatchLevel) -> _BufferWrite | None:
    """Restore the buffers of a level when its call ends; return the first still batched."""
    own = [each for each in BUFFER_WRITES if each.level is level]
    left = [each for each in own if each.is_current]
    BUFFER_WRITES[:] = [each for each in BUFFER_WRITES if each.level is not level]
    for each in left:
        each.restore()
    return left[0] if left else None


def refuse_buffer_writes(level: BatchLevel) -> None:
    """Raise if the call left a batched tensor in the buffer of a module from outside.

    Raises:
        EscapedTracerError: a buffer still holds a tensor of the level.
    """
    first = restore_buffers(level)
    if first is not None:
        raise EscapedTracerError(
            f"{level.name}: {first.description}\nThe module was made outside of the function: it "
            f"has one buffer for all examples. Give its state as an argument and return what it "
            f"becomes:\n{_REWRITE}"
        )


_REWRITE = """
    def call(buffers, x):
        state = {**dict(model.named_parameters()), **buffers}
        out = tsfunc.functional_call(model, state, x)
        return out, {name: state[name] for name in buffers}

    out, buffers = tsfunc.vmap(call, in_dims=(None, 0))(dict(model.named_buffers()), x)
"""
