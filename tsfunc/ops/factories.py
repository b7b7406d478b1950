"""Factories that take type and device from a tensor: what a batched one makes is batched.

So a tensor that is made this way can be written to with batched values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsfunc.ops.dims import align, logical_rank
from tsfunc.ops.refusal import refused
from tsfunc.ops.registry import BatchLevel, Category, Dims, row, rows


def new(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A size, and what else there is, after the tensor."""
    return op(args[0], [level.batch_size, *args[1]], *args[2:], **kwargs), 0


@row(Category.FACTORY, "aten::new_empty_strided")
def new_empty_strided(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Each example gets as much memory as its sizes and strides span."""
    x, sizes, strides = args
    if any(type(size) is int and size == 0 for size in sizes):
        return op(x, [level.batch_size, *sizes], [0, *strides], **kwargs), 0
    span: Any = 1
    for size, stride in zip(sizes, strides, strict=True):
        span = span + (size - 1) * stride
    return op(x, [level.batch_size, *sizes], [torch.sym_max(span, 1), *strides], **kwargs), 0


@row(
    Category.FACTORY,
    "aten::linspace.Tensor_Tensor",
    "aten::linspace.Tensor_Scalar",
    "aten::linspace.Scalar_Tensor",
)
def linspace(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The kernel takes numbers, so batched ends need arithmetic: from each end to the middle."""
    ends = [(x, at) for x, at in zip(args, dims, strict=False) if isinstance(x, torch.Tensor)]
    if any(logical_rank(x, at) for x, at in ends):
        return refused(op, dims, args, kwargs)
    (start, end), _ = align(args[:2], dims)
    steps, options = args[2], dict(kwargs)
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    like = start if isinstance(start, torch.Tensor) else end
    exact = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    start, end = (
        # An integer result rounds the ends, too.
        v.to(dtype).to(exact).unsqueeze(-1) if isinstance(v, torch.Tensor) else v
        for v in (start, end)
    )
    index = torch.arange(steps, device=options.get("device") or like.device)
    step = (end - start) / max(steps - 1, 1)
    low = start + step * index
    out = torch.where(index < steps // 2, low, end - step * (steps - 1 - index))
    return (out if steps > 1 else low).to(dtype), 0


@row(
    Category.FACTORY,
    "aten::logspace.Tensor_Tensor",
    "aten::logspace.Tensor_Scalar",
    "aten::logspace.Scalar_Tensor",
)
def logspace(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Powers of the base at evenly spaced exponents."""
    ends = [(x, at) for x, at in zip(args, dims, strict=False) if isinstance(x, torch.Tensor)]
    if any(logical_rank(x, at) for x, at in ends):
        return refused(op, dims, args, kwargs)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    exact = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    exponents, at = linspace(op, level, dims, args[:3], {**kwargs, "dtype": exact})
    return torch.pow(args[3] if len(args) > 3 else 10.0, exponents).to(dtype), at


rows(
    Category.FACTORY,
    new,
    "aten::new_empty",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
)
