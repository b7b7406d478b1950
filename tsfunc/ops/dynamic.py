"""Operators whose results have sizes, or Python values, that follow from the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import front, logical_rank, op_name
from tsfunc.ops.registry import BatchLevel, Category, Dims, row, rows

OUTSIDE = "or call it outside of the vmapped function"


def refuse_dynamic(op: Any, instead: str) -> NoReturn:
    """Raises the error for results whose sizes would differ from example to example."""
    raise DataDependentError(
        f"vmap: {op_name(op)}: the size of the result depends on the values of a batched tensor, "
        f"so it would differ from example to example (torch.func says: vmap: We do not support "
        f"batching operators that can output dynamic shape). {instead}, {OUTSIDE}."
    )


def item(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> NoReturn:
    """A batched tensor has a value for each example, not one."""
    raise DataDependentError(
        "vmap: It looks like you're calling .item() on a Tensor. We don't support vmap over "
        "calling .item() on a Tensor, please try to rewrite what you're doing with other "
        f"operations ({op_name(op)} was asked for one Python value, but each example has its "
        f"own), {OUTSIDE}."
    )


def compared(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> NoReturn:
    """Whole tensors compared give one bool."""
    raise DataDependentError(
        f"vmap: {op_name(op)} answers with one Python bool, but each example has its own answer. "
        f"Compare element by element, (x == y).all(), and keep the result a tensor, {OUTSIDE}."
    )


def dynamic(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> NoReturn:
    """nonzero, unique and their like."""
    refuse_dynamic(op, "Use torch.where or a mask of the full size instead")


rows(Category.DYNAMIC, item, "aten::_local_scalar_dense", "aten::item")
rows(Category.DYNAMIC, compared, "aten::equal", "aten::allclose")
rows(
    Category.DYNAMIC, dynamic,
    "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::bincount",
)  # fmt: skip


@row(Category.DYNAMIC, "aten::masked_select")
def masked_select(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """As many elements for each example as long as the mask is the same for all."""
    x, mask = args
    if dims[1] is not None:
        refuse_dynamic(op, "Use torch.where(mask, x, fill) instead")
    x = front(x, dims[0])
    for _ in range(mask.dim() - logical_rank(x, 0)):
        x = x.unsqueeze(1)
    x = x.expand(x.shape[0], *torch.broadcast_shapes(x.shape[1:], mask.shape))
    places = mask.expand(x.shape[1:]).reshape(-1).nonzero().squeeze(1)
    return x.reshape(x.shape[0], -1).index_select(1, places), 0


@row(Category.DYNAMIC, "aten::repeat_interleave.Tensor")
def repeat_interleave(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """With a known size: where each place falls among the running sums of the counts."""
    count = kwargs.get("output_size")
    if count is None:
        refuse_dynamic(op, "Give repeat_interleave an output_size that holds for all examples")
    ends = front(args[0], dims[0]).cumsum(1)
    places = torch.arange(count, device=ends.device).expand(ends.shape[0], count).contiguous()
    return torch.searchsorted(ends, places, right=True).to(args[0].dtype), 0


@row(Category.DYNAMIC, "aten::nonzero_static")
def nonzero_static(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Each place that is not zero goes to the line of its ordinal; the rest fall off the end."""
    x = front(args[0], dims[0]) != 0
    size, fill = kwargs["size"], kwargs.get("fill_value", -1)
    flat = x.reshape(x.shape[0], -1)
    order = flat.cumsum(1) - 1
    order = torch.where(flat, order, size).clamp(max=size)
    lines = order.new_full((x.shape[0], size + 1), -1)
    places = torch.arange(flat.shape[1], device=x.device).expand(flat.shape)
    lines = lines.scatter(1, order, places)[:, :size]
    columns = []
    rest = lines
    for extent in reversed(x.shape[1:]):
        columns.append(torch.where(lines < 0, fill, rest % extent))
        rest = rest // extent
    if not columns:
        return lines.new_empty((x.shape[0], size, 0)), 0
    return torch.stack(columns[::-1], -1), 0


@row(Category.TENSOR_ITERATOR, "aten::_is_any_true", "aten::_is_all_true")
def is_true(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Over all examples: only torch's own checks ask (anomaly mode, TORCH_CHECK_TENSOR_ALL)."""
    return op(args[0]), None


@row(Category.TENSOR_ITERATOR, "aten::_assert_async", "aten::_assert_async.msg")
def assert_async(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """It must hold for every example."""
    op(torch.ops.aten._is_all_true(args[0]), *args[1:])
    return None, None
