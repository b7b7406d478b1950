"""Steps that a ``GradScaler`` skips, in traces.

A ``GradScaler`` skips the optimizer's step if a gradient is infinite or NaN. It reads the data,
which a trace does not have. In a trace the step is always made, and its writes are undone by
``torch.where`` if it is to be skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tsfunc.bridge.tracers.optimizer_state import make_state
from tsfunc.errors import DataDependentError


def step_or_skip(
    self: Any,
    optimizer: torch.optim.Optimizer,
    optimizer_state: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Implement ``GradScaler._maybe_opt_step`` without a read of data."""
    flags = list(optimizer_state["found_inf_per_device"].values())
    skips = torch.stack([flag.to(flags[0].device) for flag in flags]).sum() != 0
    with torch.no_grad():
        make_state(optimizer)
        before = [(tensor, tensor.clone()) for tensor in _written_by_step(optimizer)]
    earlier = {id(tensor) for tensor, _ in before}
    out = optimizer.step(*args, **kwargs)
    with torch.no_grad():
        for tensor, old in before:
            tensor.copy_(torch.where(skips.to(tensor.device), old, tensor))
        for tensor in _written_by_step(optimizer):
            if id(tensor) not in earlier:
                _refuse_dampening(optimizer)
                tensor.copy_(torch.where(skips.to(tensor.device), torch.zeros_like(tensor), tensor))
    return out


def _written_by_step(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that a step may write into."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param
                state = optimizer.state.get(param, {})
                yield from (x for x in state.values() if isinstance(x, torch.Tensor))


def _refuse_dampening(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that the first gradient makes, and that zeros can't stand for.

    Raises:
        DataDependentError: the optimizer has dampening.
    """
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise DataDependentError(
            f"GradScaler.step({type(optimizer).__name__}): whether the first step of an optimizer "
            f"with dampening is skipped depends on data, which a trace does not have. Make the "
            f"first step outside of the specialized function, or set dampening=0."
        )
