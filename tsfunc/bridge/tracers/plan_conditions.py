"""The conditions under which a plan leaves a call to torch, checked at each call.

The compiled handlers check the same conditions (``compiled/plans.h``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass

from tsfunc.bridge.tracers.batch_tracer import TRACERS, BatchLevel
from tsfunc.bridge.tracers.call_plans import CallPlan, PlanStep
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS, tensors_in
from tsfunc.bridge.tracers.tracer import is_recorded_outside, needs_lift

_BOUNDS: Final = frozenset({int, type(None)})
_POSITIONS: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def goes_to_torch(
    plan: CallPlan, level: BatchLevel, args: Sequence[Any], values: Sequence[Any]
) -> bool:
    """True if torch may be called in a plan's place, whose conditions hold for the arguments."""
    if plan.needs_outer_dims_first and not has_outer_dims_first(values):
        return False
    if plan.needs_fixed_sizes and not _have_fixed_sizes(args):
        return False
    if plan.needs_positions and not are_positions(args[1]):
        return False
    return not (plan.plain_positions and need_lifting(plan, values, level))


def _have_fixed_sizes(args: Sequence[Any]) -> bool:
    with DisableTorchFunctionSubclass():
        return not any(
            isinstance(size, torch.SymInt) for value in tensors_in(args) for size in value.shape
        )


def are_positions(index: Any) -> bool:
    """True if the tensors of an index are integers, no masks, with at least one dim."""
    with DisableTorchFunctionSubclass():
        return all(item.dim() and item.dtype in _POSITIONS for item in tensors_in([index]))


def has_outer_dims_first(values: Sequence[Any]) -> bool:
    """True if no bound of a slice is a tensor, and batch dims of outer levels are the first."""
    for value in values:
        if isinstance(value, list | tuple):
            if not has_outer_dims_first(value):
                return False
        elif isinstance(value, slice):
            if not _BOUNDS.issuperset((type(value.start), type(value.stop), type(value.step))):
                return False
        else:
            while type(value) in TRACERS:
                if value.bdim != 0:
                    return False
                value = value.value
            if isinstance(value, torch.Tensor) and type(value) not in PLAIN_TENSORS:
                return False
    return True


def need_lifting(plan: CallPlan, values: Sequence[Any], level: BatchLevel) -> bool:
    """True if a plan's call needs plain tensors lifted (NOTE [operands of outer levels])."""
    needs = is_recorded_outside if plan.step is PlanStep.BELOW_AUTOGRAD else needs_lift
    return any(
        needs(value, level)
        for position in plan.plain_positions
        for value in tensors_in(values[position])
    )
