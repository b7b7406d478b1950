"""Parameters and buffers of modules that a function under vmap writes to or assigns.

NOTE [state of modules]
``self.count = self.count + x.sum()`` puts a batched tensor into a module, and ``self.count += 1``
with a batched operand makes the module's buffer batched. During the call the buffer is read like
any other value. A module that was made outside of the function has one buffer for all examples, so
after the call it would hold a tracer of a transform that has ended.

The module itself does not tell whether the tensor is its own: ``functional_call`` puts tensors of
the function into it and takes them out again. The call therefore decides when it ends. If the
module still holds a tensor of the level, its previous state is restored, and the call is refused.
torch's registration hook of buffers reports each assignment; programs, which assign without the
hook, call :func:`note_assignment` themselves; ``writes`` calls :func:`note_write`. Calls that do
neither pay nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from tsfunc import hooks
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.reachable import ModuleEntry
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.bridge.writing.naming import DescribedTensor
from tsfunc.bridge.writing.outside import OutsideTensors, recent_tensors
from tsfunc.errors import EscapedTracerError
from tsfunc.user_code import source_line, user_location


@dataclass(frozen=True)
class _StateWrite:
    """A parameter or buffer of a module that became a tensor of a level.

    Attributes:
        module: weak reference to the module.
        kind: the attribute of the module that has the entry.
        name: the entry's name.
        level: the level, at the end of whose call the entry is looked at.
        undo: restores the previous state.
        error: the error of a call that leaves the entry so.
    """

    module: weakref.ref[torch.nn.Module]
    kind: str
    name: str
    level: TracerLevel
    undo: Callable[[], None]
    error: Exception

    @property
    def is_current(self) -> bool:
        """True if the module still holds a tensor of the level."""
        module = self.module()
        value = None if module is None else vars(module)[self.kind].get(self.name)
        return isinstance(value, Tracer) and call_of(value.dispatch_level) is self.level


STATE_WRITES: Final[list[_StateWrite]] = []
"""The writes to the state of modules in calls that have not ended."""


def call_of(level: TracerLevel) -> TracerLevel:
    """Return the level of the transformed call that a level belongs to."""
    return level.original.root if isinstance(level, BatchLevel) else level.root


def note_write(
    entries: Sequence[ModuleEntry], level: TracerLevel, undo: Callable[[], None], error: Exception
) -> None:
    """Record that a write has turned entries of modules into tensors of a level."""
    STATE_WRITES.extend(
        _StateWrite(weakref.ref(e.module), e.kind, e.name, call_of(level), undo, error)
        for e in entries
    )


def note_assignment(module: Any, name: str, value: Any) -> None:
    """Record an assigned batched buffer; torch and programs call this before each assignment."""
    level = _level_of(value)
    if level is None or not level.alive or not isinstance(module, torch.nn.Module):
        return
    before = module._buffers.get(name)
    if _level_of(before) is level:
        return
    if before is None or _is_from_outside(before, level):
        location = user_location()
        named = f"the buffer {name!r}" if before is None else DescribedTensor(before)
        error = EscapedTracerError(
            f"{level.name}: {named} is assigned values that differ between examples, at {location}"
            f"{source_line(location, ': ')}\nThe module was made outside of the function: it has "
            f"one buffer for all examples. Pass its state as an argument and return the new "
            f"state:\n{_REWRITE}"
        )
        module_ref, at = weakref.ref(module), "_buffers"

        def undo() -> None:
            restored = module_ref()
            if restored is not None:
                restored._buffers[name] = before

        STATE_WRITES.append(_StateWrite(module_ref, at, name, level, undo, error))


register_module_buffer_registration_hook(note_assignment)


def _level_of(value: Any) -> TracerLevel | None:
    return call_of(value.dispatch_level) if isinstance(value, BatchTracer) else None


def _is_from_outside(tensor: torch.Tensor, level: TracerLevel) -> bool:
    """True if the function of a level did not make a tensor, or has stored it outside."""
    if id(tensor) not in recent_tensors():
        return True
    outside = OutsideTensors(level)
    return tensor in outside or any(entry.tensor is tensor for entry in outside.entries)


@hooks.transform_failed.add
def _restore_state_of_ended_calls() -> None:
    """Restore the state of modules that calls which have ended did not restore."""
    for write in reversed(STATE_WRITES):
        if not write.level.alive and write.is_current:
            write.undo()
    STATE_WRITES[:] = [write for write in STATE_WRITES if write.level.alive]


def restore_state(level: TracerLevel) -> _StateWrite | None:
    """Restore the state of modules when the call of a level ends; return the first write to it."""
    left = [write for write in STATE_WRITES if write.level is level and write.is_current]
    STATE_WRITES[:] = [e for e in STATE_WRITES if e.level is not level and e.level.alive]
    for entry in reversed(left):
        entry.undo()
    return left[0] if left else None


def refuse_state_writes(level: TracerLevel) -> None:
    """Raise if the call left a tensor of the level in a module from outside.

    Raises:
        EscapedTracerError: the tensor was assigned.
        InplaceRefused: the tensor was written to.
    """
    first = restore_state(level)
    if first is not None:
        raise first.error


_REWRITE = """
    def call(buffers, x):
        state = {**dict(model.named_parameters()), **buffers}
        out = tsfunc.functional_call(model, state, x)
        return out, {name: state[name] for name in buffers}

    out, buffers = tsfunc.vmap(call, in_dims=(None, 0))(dict(model.named_buffers()), x)
"""
