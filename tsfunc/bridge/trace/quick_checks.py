"""Many tensors looked at in one call: whether they are like those that a program was made for.

Private names used here (torch 2.11 to 2.13): ``_C._dynamo.guards.TensorGuards`` compares the class,
type, device, sizes, strides and dispatch keys of tensors in C++, in a tenth of the time that
reading them takes in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from tsfunc.bridge.tracers import torch_state

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def quick_check(examples: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that says yes only to tensors that are like the examples in all of this.

    It may say no to some that are: of another class, or one tensor in two places. Such are to be
    looked at more closely.

    Args:
        examples: tensors with their sizes and strides.

    Returns:
        The function, which takes as many tensors; None where there are none, or some stand for
        others.
    """
    if not examples or any(type(x) not in _PLAIN or x.layout != torch.strided for x in examples):
        return None
    # torch declares one list for all tensors; it takes one for each.
    sizes: Any = [list(x.shape) for x in examples]
    strides: Any = [list(x.stride()) for x in examples]
    with torch_state.outside_all_levels():
        guards = TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check
