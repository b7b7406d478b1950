"""One C++ call that compares many tensors with the examples of a program.

Private names used here (torch 2.11 to 2.13): ``_C._dynamo.guards.TensorGuards`` compares the
class, dtype, device, sizes, strides and dispatch keys of tensors in C++, ten times as fast as
reading them in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from tsfunc.bridge.tracers import torch_state

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def quick_check(examples: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that is True only for tensors with the same properties as the examples.

    The function may be False for tensors that do match: tensors of another class, or one tensor in
    two places. Such tensors need a full check.

    Args:
        examples: tensors with their sizes and strides.

    Returns:
        The function, which takes as many tensors as there are examples; None without examples, or
        if an example is not a plain strided tensor.
    """
    if not examples or any(type(x) not in _PLAIN or x.layout != torch.strided for x in examples):
        return None
    # torch's annotation is one list for all tensors; the function takes a list of lists.
    sizes: Any = [list(x.shape) for x in examples]
    strides: Any = [list(x.stride()) for x in examples]
    with torch_state.outside_all_levels():
        guards = TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check
