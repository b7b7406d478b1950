"""``torch.autograd.graph.saved_tensors_hooks`` for tensors that autograd saves at any level.

NOTE [hooks and levels]
Hooks entered on a thread see the tensors that autograd saves at every level: plain tensors, and the
tracers of the levels that record. A packed tracer is disconnected from the graph of its own level
only, and autograd connects it again. The operations of a pack hook on the tracer are recorded by
the outer levels, although torch has switched recording off. Tensors saved by a level that was
entered after the hooks are kept without calling the hooks: the transform has finished its pullback
before the level ends, and a checkpoint that runs the transform again would get values of another
level. All tensors that a trace saves are kept so, the plain ones too: a checkpoint that runs the
traced function again runs its program. When the unpack hook runs, the levels around the hooks may
have ended; these levels are then active again during the call.

The first transform of a process may run inside of hooks, such as those of a checkpoint. The hooks
that its thread has entered are therefore replaced too. Without this, the first run of a checkpoint
would save tensors that its other runs do not save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.reentry import any_level_ended, reenter
from tsfunc.bridge.tracers.registrations import on_first_transform
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, serials
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.state import overriding, tls

_torch_hooks = saved_tensors_hooks.__enter__


def _enter(self: saved_tensors_hooks) -> None:
    pack = _packing(self.pack_hook, next(serials))
    with overriding(self, pack_hook=pack, unpack_hook=_unpacking(self.unpack_hook)):
        _torch_hooks(self)


def _replace_entered() -> None:
    """Replace the hooks that this thread has entered, outside of all levels."""
    entered = []
    while (hooks := _innermost()) is not None:
        entered.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(entered):
        _autograd._push_saved_tensors_default_hooks(_packing(pack, 0), _unpacking(unpack))


on_first_transform(setattr, saved_tensors_hooks, "__enter__", _enter)
_innermost = functools.partial(_autograd._top_saved_tensors_default_hooks, True)
on_first_transform(_replace_entered, needed=_innermost)


class _UnhookedTensor:
    """A saved tensor that bypasses the hooks."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _packing(pack: Callable[[torch.Tensor], Any], entered: int) -> Callable[[torch.Tensor], Any]:
    """Return a pack hook for tensors of all levels.

    Args:
        pack: the user's hook.
        entered: a serial number; levels entered after the hooks have larger ones.
    """

    def packed(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, Tracer):
            return _UnhookedTensor(tensor) if _is_traced_after(entered) else pack(tensor)
        alias = tensor.aliased_here()
        if tensor.dispatch_level.root.serial > entered:
            return _UnhookedTensor(alias)
        with torch.enable_grad():
            return pack(alias)

    return packed


def _is_traced_after(serial: int) -> bool:
    """True if the running code is traced at a level with a larger serial number."""
    return any(
        level.key is DispatchKey.Trace and level.serial > serial
        for level in tls.state.levels
        if isinstance(level, TracerLevel)
    )


def _unpacking(unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    state = tls.state

    @restoring_thread_state
    def unpacked(packed: Any) -> torch.Tensor:
        if type(packed) is _UnhookedTensor:
            return packed.tensor
        if not any_level_ended(state):
            return unpack(packed)
        with reenter(state):
            return unpack(packed)

    return unpacked
