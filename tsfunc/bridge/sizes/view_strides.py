"""Strides of ``Tensor.view``.

torch's rule for fake tensors accepts some views that the kernel refuses: those that join dims
across a dim of size 1. A program with such a view would fail, or read the wrong elements.

Source: ``computeStride`` in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def check_view(name: str, args: Sequence[Any], result: Any) -> None:
    """Raise the error of torch's kernel if a tensor has no such view.

    Args:
        name: the name of the operator; other operators than ``aten::view`` are not checked.
        args: the arguments, of which the first is the tensor.
        result: the view by torch's rule for fake tensors.

    Raises:
        RuntimeError: the tensor has no such view.
    """
    if name != "aten::view" or not isinstance(result, torch.Tensor):
        return
    x = args[0]
    sizes = (*x.shape, *x.stride(), *result.shape)
    if not all(type(n) is int for n in sizes) or 0 in result.shape:
        return  # a comparison would be a guard
    if not has_view(x.shape, x.stride(), result.shape):
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one "
            "dimension spans across two contiguous subspaces). Use .reshape(...) instead."
        )


def has_view(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return True if a tensor of these sizes and strides has a view of the wanted sizes.

    Both have the same number of elements, which is not 0.
    """
    if not shape:
        return True
    at = len(wanted) - 1
    elements, viewed = 1, 1
    step = strides[-1]  # of the innermost dim of a run that one dim can view
    for dim in reversed(range(len(shape))):
        elements *= shape[dim]
        if dim > 0 and (shape[dim - 1] == 1 or strides[dim - 1] == elements * step):
            continue
        while at >= 0 and (viewed < elements or wanted[at] == 1):
            viewed *= wanted[at]
            at -= 1
        if viewed != elements:
            return False
        if dim > 0:
            elements, viewed, step = 1, 1, strides[dim - 1]
    return at == -1
