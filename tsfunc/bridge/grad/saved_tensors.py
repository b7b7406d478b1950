"""``torch.autograd.graph.saved_tensors_hooks`` for tensors that autograd saves at any level.

NOTE [hooks and levels]
Hooks entered on a thread see the tensors that autograd saves at every level: plain tensors, and the
tracers of the levels that record. A packed tracer is disconnected from the graph of its own level
only, and autograd connects it again. The operations of a pack hook on the tracer are recorded by
the outer levels, although torch has switched recording off. Tensors saved by a level that was
entered after the hooks are kept without calling the hooks: the transform has finished its pullback
before the level ends, and a checkpoint that runs the transform again would get values of another
level. When the unpack hook runs, the levels around the hooks may have ended; these levels are then
active again during the call.

Private names used here (torch 2.13 and 2.14): none; ``saved_tensors_hooks`` is public, and
``__enter__`` reads ``pack_hook`` and ``unpack_hook``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tsfunc.bridge.tracers.reentry import any_ended, reenter
from tsfunc.bridge.tracers.registrations import on_first_level
from tsfunc.bridge.tracers.tracer import Tracer, serials
from tsfunc.dispatch.state import tls

_theirs = saved_tensors_hooks.__enter__


def _enter(self: saved_tensors_hooks) -> None:
    pack, unpack = self.pack_hook, self.unpack_hook
    self.pack_hook, self.unpack_hook = _packing(pack), _unpacking(unpack)
    try:
        _theirs(self)
    finally:
        self.pack_hook, self.unpack_hook = pack, unpack


on_first_level(setattr, saved_tensors_hooks, "__enter__", _enter)


class _UnhookedTensor:
    """A saved tensor that bypasses the hooks."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _packing(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    entered = next(serials)

    def packed(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, Tracer):
            return pack(tensor)
        alone = tensor.aliased_here()
        if tensor.dispatch_level.root.serial > entered:
            return _UnhookedTensor(alone)
        with torch.enable_grad():
            return pack(alone)

    return packed


def _unpacking(unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    state = tls.state

    def unpacked(packed: Any) -> torch.Tensor:
        if type(packed) is _UnhookedTensor:
            return packed.tensor
        if not any_ended(state):
            return unpack(packed)
        with reenter(state):
            return unpack(packed)

    return unpacked
