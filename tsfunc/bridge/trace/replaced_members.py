"""Members of torch's classes that a trace replaces, because a program can't repeat what they do.

NOTE [weights of recurrent modules]
A recurrent module also keeps its parameters in a list. If ``functional_call`` has replaced
parameters, the next forward pass makes a new list of the replacements, and the module keeps this
list after the call. In a trace, the module's code therefore gets a list of the parameters that the
module has at that moment, and the module's own list stays as it is.

NOTE [steps that a GradScaler skips]
A ``GradScaler`` skips the optimizer's step if a gradient is infinite or NaN, for which it reads
data. A trace has no data: the step is always made, and ``torch.where`` undoes its writes if it is
to be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import RNNBase

from tsfunc.bridge.tracers.optimizer_state import make_state
from tsfunc.errors import DataDependentError


def _keep_weights(self: Any) -> None:
    """Implement ``RNNBase._update_flat_weights``: NOTE [weights of recurrent modules]."""


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _step_or_skip(
    self: Any,
    optimizer: torch.optim.Optimizer,
    optimizer_state: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Implement ``GradScaler._maybe_opt_step``: NOTE [steps that a GradScaler skips]."""
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


REPLACED_METHODS: Final[Mapping[Any, Callable[..., Any]]] = {
    GradScaler._maybe_opt_step: _step_or_skip,
    RNNBase._update_flat_weights: _keep_weights,
}
"""The functions that a trace calls, by torch's methods."""

REPLACED_ATTRIBUTES: Final[Mapping[str, tuple[type, Callable[[Any], Any]]]] = {
    "_flat_weights": (RNNBase, _flat_weights),
}
"""For attributes of objects of a class: the class, and the function that computes the value."""
