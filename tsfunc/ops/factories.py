"""Factories that take dtype and device from a tensor; a batched tensor gives a batched result.

The result can therefore be written with batched values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import align, logical_rank
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row, rows


def new(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The arguments are the tensor, the size, and further arguments."""
    return op(args[0], [level.batch_size, *args[1]], *args[2:], **kwargs), 0


@row("aten::new_empty_strided")
def new_empty_strided(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Each example gets as much memory as its sizes and strides span."""
    x, sizes, strides = args
    if any(type(size) is int and size == 0 for size in sizes):
        return op(x, [level.batch_size, *sizes], [0, *strides], **kwargs), 0
    span: Any = 1
    for size, stride in zip(sizes, strides, strict=True):
        span = span + (size - 1) * stride
    return op(x, [level.batch_size, *sizes], [torch.sym_max(span, 1), *strides], **kwargs), 0


@row("aten::linspace.Tensor_Tensor", "aten::linspace.Tensor_Scalar", "aten::linspace.Scalar_Tensor")
def linspace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The kernel takes numbers, so batched ends use arithmetic."""
    if not _are_real_scalars(bdims, args, kwargs):
        return raise_as_one_example(op, bdims, args, kwargs)
    numbers, dtype = _linspace_of_tensors(bdims, args, kwargs)
    return numbers.to(dtype), 0


def _are_real_scalars(bdims: BatchDims, args: Args, kwargs: Kwargs) -> bool:
    """True if both ends are single numbers, which are complex only if the result is."""
    ends = list(zip(args[:2], bdims, strict=False))
    if any(isinstance(x, Tensor) and logical_rank(x, bdim) for x, bdim in ends):
        return False
    dtype = kwargs.get("dtype")
    return dtype is None or dtype.is_complex or not any(map(_is_complex, args[:2]))


def _is_complex(end: Any) -> bool:
    return end.is_complex() if isinstance(end, Tensor) else isinstance(end, complex)


def _linspace_of_tensors(
    bdims: BatchDims, args: Args, kwargs: Kwargs
) -> tuple[Tensor, torch.dtype]:
    """Return evenly spaced numbers before rounding, and the dtype of the result."""
    (start, end), _ = align(args[:2], bdims)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if kwargs.get("dtype") is None and any(map(_is_complex, args[:2])):
        dtype = dtype.to_complex()
    like = start if isinstance(start, Tensor) else end
    exact = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    start, end = (
        # An integer result also rounds the ends.
        torch.as_tensor(v, device=kwargs.get("device") or like.device).to(dtype).to(exact)
        for v in (start, end)
    )
    return evenly_spaced(start, end, args[2]), dtype


def evenly_spaced(start: Tensor, end: Tensor, steps: int) -> Tensor:
    """Return evenly spaced numbers in a new last dim, computed from both ends as in torch."""
    start, end = start.unsqueeze(-1), end.unsqueeze(-1)
    index = torch.arange(steps, device=start.device)
    step = (end - start) / max(steps - 1, 1)
    low = start + step * index
    if steps == 1:
        return low
    return torch.where(index < steps // 2, low, end - step * (steps - 1 - index))


@row("aten::logspace.Tensor_Tensor", "aten::logspace.Tensor_Scalar", "aten::logspace.Scalar_Tensor")
def logspace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return powers of the base at evenly spaced exponents."""
    if not _are_real_scalars(bdims, args, kwargs):
        return raise_as_one_example(op, bdims, args, kwargs)
    exponents, dtype = _linspace_of_tensors(bdims, args, kwargs)
    return torch.pow(args[3] if len(args) > 3 else 10.0, exponents).to(dtype), 0


rows(new, "aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full")
