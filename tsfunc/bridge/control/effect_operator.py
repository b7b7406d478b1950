"""The operator of debug prints, callbacks and checks.

NOTE [debug effects]
``tsfunc_debug::call(values, effect, batch_dims)`` returns nothing and has an effect on the host: a
Python function is called with the values. Every level treats it as an operator. The batching rule
moves the batch dim to the front and counts it in ``batch_dims`` (``ops/debug_calls.py``). The
operator finally gets plain tensors whose first dims are the examples of all vmaps, the outermost
vmap's first. A trace records it as a node. Passes keep the node and the order of nodes, as for all
operators without results. Autograd does not record it.

``effect`` is the number of the function. The call holds the function, and so does the node of a
program. Pullbacks and pushforwards of control flow run the bodies again, and mute the effects of
that run, except checks.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.library
from torch import Tensor

from tsfunc.bridge.control.axis_collectives import axis_index
from tsfunc.bridge.trace.trace_level import TraceLevel, trace_kernel
from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.tracer_stack import unwrap_all
from tsfunc.dispatch import DispatchKey, register, running_level
from tsfunc.dispatch.state import overriding, tls

_library = torch.library.Library("tsfunc_debug", "DEF")
_library.define("call(Tensor[] values, int effect, int batch_dims) -> ()")
CALL: Any = torch.ops.tsfunc_debug.call.default


class _Muted(threading.local):
    active = False


_muted = resets(_Muted())


def mute_effects() -> AbstractContextManager[None]:
    """Suppress prints and callbacks on this thread, for a run that repeats an earlier one."""
    return overriding(_muted, active=True)


class Effect:
    """A Python function that the operator calls, by its number.

    Attributes:
        call: the function; takes the plain tensors, and the number of their batch dims.
        checks: True if it has no effect but the errors that it raises.
    """

    def __init__(
        self, call: Callable[[Sequence[Tensor], int], None], *, checks: bool = False
    ) -> None:
        self.call = call
        self.checks = checks
        self.number = next(_numbers)
        _effects[self.number] = self

    def __call__(self, values: Sequence[Tensor]) -> None:
        """Run on tensors of any level, now or in the program that is being traced."""
        args = [as_seen_by_current_level(value) for value in values], self.number, 0
        if not values:  # no argument says that a trace is running
            for level in reversed(tls.state.levels):
                if isinstance(level, TraceLevel):
                    operator_of(CALL).run_at(level, args, {})
                    return
        CALL(*args)


_numbers = itertools.count()
_effects: weakref.WeakValueDictionary[int, Effect] = weakref.WeakValueDictionary()


def example_indices(value: Tensor) -> list[Tensor]:
    """Return the index of the running example in each vmap that batches a tensor, outermost first.

    Each index is a batched tensor of its vmap's level, and counts the examples of the whole call.
    """
    _, stack = unwrap_all(as_seen_by_current_level(value))
    return [axis_index(level, value.device) + level.original.first for level in stack.batch_levels]


def _run_effect(values: Sequence[Tensor], effect: int, batch_dims: int) -> None:
    function = _effects.get(effect)
    if function is None:
        raise RuntimeError(
            "debug: a program calls a Python function that is gone, because the program that it "
            "was copied from is. Keep that program."
        )
    if function.checks or not _muted.active:
        function.call([value.detach() for value in values], batch_dims)


_library.impl("call", _run_effect, "CompositeExplicitAutograd")
_library.impl("call", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("tsfunc_debug::call", lambda *args: None, lib=_library)


@register("tsfunc_debug::call", DispatchKey.Trace)
def _record(values: Sequence[Tensor], effect: int, batch_dims: int) -> None:
    """Record the call; the node holds the function."""
    level = running_level()
    assert isinstance(level, TraceLevel)
    trace_kernel(operator_of(CALL), (list(values), effect, batch_dims), {})
    recorded = level.bodies[-1] if level.bodies and not values else level
    next(reversed(recorded.graph.nodes)).meta["effect"] = _effects[effect]
