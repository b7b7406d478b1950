"""Strides of the results of pointwise operators that broadcast.

torch computes these results with its TensorIterator, which orders the dims by the strides of the
operands. The rules of its fake tensors differ from the kernels for some operands with dims of
size 1 or with fewer dims than the result: a program made with such strides would take views that
the kernels' results do not have. Here the order is that of the kernels.

Source: ``TensorIteratorBase::reorder_dimensions`` in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.ops.tensor_iterator import pointwise, where

_RULES = frozenset({pointwise, where})


def kernel_strides(op: TorchOperator, args: Sequence[Any], result: Any) -> list[int] | None:
    """Return the strides of a pointwise operator's result, if torch's rule has found others.

    None as well for other operators, for operands with equal shapes and for symbolic sizes.
    """
    if op.row is None or op.row.rule not in _RULES or not isinstance(result, torch.Tensor):
        return None
    operands = [x for x in args if isinstance(x, torch.Tensor)]
    shape = result.shape
    if all(x.shape == shape for x in operands):
        return None
    sizes = [*shape, *(n for x in operands for n in (*x.shape, *x.stride()))]
    if not all(type(n) is int for n in sizes):
        return None
    strides = _strides(shape, [_broadcast_strides(x, shape) for x in operands])
    if all(a == b for a, b, n in zip(strides, result.stride(), shape, strict=True) if n != 1):
        return None
    return strides


def _broadcast_strides(x: torch.Tensor, shape: torch.Size) -> list[int]:
    """Return an operand's strides in the dims of the result, 0 in those that it lacks."""
    missing = len(shape) - x.dim()
    pairs = zip(x.shape, x.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if n == 1 and size != 1 else step for n, step, size in pairs]


def _strides(shape: torch.Size, operands: Sequence[Sequence[int]]) -> list[int]:
    order = [*reversed(range(len(shape)))]  # the dims from the innermost outwards

    def compare(a: int, b: int) -> int:
        """Return 1 if dim ``b`` belongs inside of dim ``a``, -1 if outside, 0 if it is open."""
        for steps in operands:
            if steps[a] == 0 or steps[b] == 0:
                continue
            if steps[a] != steps[b]:
                return 1 if steps[a] > steps[b] else -1
            if shape[a] > shape[b]:
                return 1
        return 0

    for i in range(1, len(order)):
        at = i
        for k in reversed(range(i)):
            found = compare(order[k], order[at])
            if found > 0:
                order[k], order[at] = order[at], order[k]
                at = k
            elif found < 0:
                break
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides
