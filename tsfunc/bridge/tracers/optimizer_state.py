"""The state of torch's optimizers before their first step, and the numbers in it.

NOTE [counts of steps]
An optimizer keeps its count of steps in a float32 tensor. The optimizer reads the count as a Python
float, and computes in double precision: ``1 - beta2 ** step``. In traces, torch's optimizers
compute with the tensor, and the results would have the precision of float32, which a float64 model
does not reach. The tensor is therefore converted first. A double of 0 dims does not change the
dtype of other tensors.

``_init_group`` of each class in ``torch.optim`` makes the missing state of a group's parameters,
and puts parameters, gradients and state into the lists that it is given. ``_get_value``, which the
modules of the classes import, returns a number of the state: a Python number, or the tensor in a
trace.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer

from tsfunc.bridge.tracers.torch_settings import replaces_in_traces


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of all parameters of an optimizer that its first step would make.

    State that depends on the first gradient, like the momentum of SGD, is left out, and so is the
    state of an optimizer that has no function for it. The parameters must have a ``.grad``.
    """
    init: Any = getattr(optimizer, "_init_group", None)
    if init is None:
        return
    names = list(inspect.signature(init).parameters)[1:]
    for group in optimizer.param_groups:
        lists: list[list[Any]] = [[] for _ in names]
        init(group, *lists)


_get_value: Any = _torch_optimizer._get_value


def _number_of_state(x: Any) -> Any:
    """Return a number of an optimizer's state, in double precision: NOTE [counts of steps]."""
    value = _get_value(x)
    counts = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if counts else value


for _name, _module in list(sys.modules.items()):
    if _name.startswith("torch.optim.") and vars(_module).get("_get_value") is _get_value:
        replaces_in_traces(_module, {"_get_value": _get_value}, {"_get_value": _number_of_state})
