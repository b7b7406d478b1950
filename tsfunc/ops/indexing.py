"""Indexing along one dim: gather, scatter, index_*, take and put."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    align_batch_dim,
    at_least_one_entry,
    batch_to_front,
    expand_at,
    expand_to_front,
    flatten_logical,
    logical_rank,
    logical_shape,
    physical_dim,
    refuse_inplace,
    wrap_dim,
)
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row, rows


def _is_inplace(op: Any) -> bool:
    return str(op.name()).partition(".")[0].endswith("_")


def _rows_of(x: Tensor, bdim: int | None, size: int) -> tuple[Tensor, bool]:
    """Return the tensor with its batch dim first, and True if it was a scalar and got a dim."""
    x = expand_to_front(x, bdim, size)
    return (x.unsqueeze(1), True) if x.dim() == 1 else (x, False)


@row("aten::gather")
def gather(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The index and the values have the same rank, so both need the batch dim."""
    x, dim, index = args
    size = level.batch_size
    if bdims[2] is None and x.dim() - 1 == index.dim() > 0:
        index = expand_at(index, None, size, bdims[0])
        return op(x, physical_dim(dim, x.dim() - 1, bdims[0]), index, **kwargs), bdims[0]
    x, _ = _rows_of(x, bdims[0], size)
    index, scalar = _rows_of(index, bdims[2], size)
    out = op(x, wrap_dim(dim, x.dim() - 1) + 1, index, **kwargs)
    return (out.squeeze(1) if scalar else out), 0


def scatter(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Write one element per index; the source is a tensor or a number."""
    x, dim, index, source, *rest = args
    size = level.batch_size
    inplace = _is_inplace(op)
    if inplace and bdims[0] is None:
        refuse_inplace(op)
    written, scalar = _rows_of(x, bdims[0], size)
    index, _ = _rows_of(index, bdims[2], size)
    if isinstance(source, Tensor):
        source, _ = _rows_of(source, bdims[3], size)
    out = op(written, wrap_dim(dim, written.dim() - 1) + 1, index, source, *rest, **kwargs)
    if inplace:
        return x, bdims[0]
    return (out.squeeze(1) if scalar else out), 0


rows(
    scatter,
    "aten::scatter.src", "aten::scatter.value", "aten::scatter.reduce",
    "aten::scatter.value_reduce", "aten::scatter_add", "aten::scatter_reduce.two",
    "aten::scatter_.src", "aten::scatter_.value", "aten::scatter_.reduce",
    "aten::scatter_.value_reduce", "aten::scatter_add_", "aten::scatter_reduce_.two",
)  # fmt: skip


@row("aten::index_select")
def index_select(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Select by a shared index, select from a shared tensor, or gather if both are batched."""
    x, dim, index = args
    bdim, q = bdims[0], bdims[2]
    size = level.batch_size
    if logical_rank(index, q) > 1 or (
        logical_rank(x, bdim) == 0 and math.prod(logical_shape(index, q)) != 1
    ):
        return raise_as_one_example(op, bdims, args, kwargs)
    if q is None:
        if x.dim() == 1:
            wrap_dim(dim, 0)
            return op(x.unsqueeze(1), 1, index.reshape(1)).squeeze(1), 0
        return op(x, physical_dim(dim, x.dim() - 1, bdim), index), bdim
    index, _ = _rows_of(index, q, size)
    rank = logical_rank(x, bdim)
    dim = wrap_dim(dim, rank)
    if bdim is None and rank:
        return op(x, dim, index.flatten()).unflatten(dim, index.shape), dim
    x, flat = _rows_of(x, bdim, size)
    pairs = _as_halves(x)
    out = _view_as_complex(pairs.gather(dim + 1, _spread(index, dim + 1, pairs)), x)
    return (out.squeeze(1) if flat else out), 0


def _as_halves(x: Tensor) -> Tensor:
    """View complex32 numbers as pairs of halves: gather and scatter have no complex32 kernels."""
    return torch.view_as_real(x) if x.dtype is torch.complex32 else x


def _view_as_complex(x: Tensor, like: Tensor) -> Tensor:
    """View pairs of halves as complex32 numbers again."""
    return torch.view_as_complex(x) if like.dtype is torch.complex32 else x


def _spread(index: Tensor, dim: int, like: Tensor) -> Tensor:
    """Expand an index for dim ``dim`` of each example to one index per element of ``like``."""
    shape = [1] * like.dim()
    shape[0], shape[dim] = index.shape
    whole = list(like.shape)
    whole[dim] = index.shape[1]
    return index.view(shape).expand(whole)


@row(
    "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_",
    "aten::index_reduce", "aten::index_reduce_",
)  # fmt: skip
@refuse_like_torch
def index_write(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call the operator for a shared index, else the corresponding scatter."""
    x, dim, index, source, *rest = args
    bdim, _, q, s = bdims[:4]
    size = level.batch_size
    inplace = _is_inplace(op)
    if inplace and bdim is None:
        refuse_inplace(op)
    written, flat = _rows_of(x, bdim, size)
    dim = wrap_dim(dim, written.dim() - 1) + 1
    source = expand_to_front(source, s, size)
    if source.dim() < written.dim():  # a source without dims can stand for one element
        source = source.unsqueeze(1)
    if q is None:
        out = op(written, dim, index, source, *rest, **kwargs)
    else:
        index, _ = _rows_of(index, q, size)
        out = _scatter_by_example(op, written, dim, index, source, rest, kwargs)
    if inplace:
        return x, bdim
    return (out.squeeze(1) if flat else out), 0


def _scatter_by_example(
    op: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, rest: Any, kwargs: Any
) -> Tensor:
    """index_add, index_copy or index_reduce with one index per example."""
    name = op.name().removeprefix("aten::")
    suffix = "_" if name.endswith("_") else ""
    if name.startswith("index_add") and kwargs.get("alpha", 1) != 1:
        source = source * kwargs["alpha"]
    x_pairs, source = _as_halves(x), _as_halves(source)
    positions = _spread(index, dim, source)
    out: Tensor
    if name.startswith("index_add"):
        out = getattr(x_pairs, f"scatter_add{suffix}")(dim, positions, source)
    elif name.startswith("index_copy"):
        out = getattr(x_pairs, f"scatter{suffix}")(dim, positions, source)
    else:
        out = getattr(x_pairs, f"scatter_reduce{suffix}")(dim, positions, source, rest[0], **kwargs)
    return _view_as_complex(out, x)


@row(
    "aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor",
    "aten::index_fill_.int_Scalar", "aten::index_fill_.int_Tensor",
)  # fmt: skip
@refuse_like_torch
def index_fill(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Fill with one number for a shared index, else with numbers per example."""
    x, dim, index, value = args
    bdim, _, q, v = (*bdims, None)[:4]
    inplace = _is_inplace(op)
    if inplace and bdim is None:
        refuse_inplace(op)
    size = level.batch_size
    written, flat = _rows_of(x, bdim, size)
    dim = wrap_dim(dim, written.dim() - 1) + 1
    if q is None and v is None:
        out = op(written, dim, index.reshape(-1), value)
    else:
        index, _ = _rows_of(index, q, size)
        out = _index_fill(op, written, dim, index, value, v)
    if inplace:
        return x, bdim
    return (out.squeeze(1) if flat else out), 0


def _index_fill(
    op: Any, x: Tensor, dim: int, index: Tensor, value: Any, value_bdim: int | None
) -> Tensor:
    """index_fill with an index or a value for each example.

    A mask selects the elements, so that a repeated index counts once in the gradient of the value.
    """
    if value_bdim is not None:
        value = value.view(-1, *[1] * (x.dim() - 1))
    mask = _index_mask(x, dim, index)
    if isinstance(value, Tensor):
        filled = torch.where(mask, value.to(x.dtype), x)
        return x.copy_(filled) if _is_inplace(op) else filled
    return x.masked_fill_(mask, value) if _is_inplace(op) else x.masked_fill(mask, value)


def _index_mask(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return a broadcastable mask of the positions along a dim that each example's index names."""
    size = x.shape[dim]
    index = torch.where(index < 0, index + size, index)
    mask = torch.zeros((x.shape[0], size), dtype=torch.bool, device=x.device)
    shape = [1] * x.dim()
    shape[0], shape[dim] = x.shape[0], size
    return mask.scatter_(1, index, True).view(shape)


@row("aten::take")
@refuse_like_torch
def take(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Index into the flattened elements of each example."""
    x, index = args
    if bdims[0] is None:
        return op(x, index), bdims[1]
    x = batch_to_front(x, bdims[0])
    x = x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)
    if bdims[1] is None:
        return x[:, index], 0
    index = batch_to_front(index, bdims[1])
    flat = flatten_logical(index)
    flat = torch.where(flat < 0, flat + x.shape[1], flat)
    return x.gather(1, flat).view(index.shape), 0


@row("aten::put", "aten::put_")
@refuse_like_torch
def put(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Write into the flattened elements of each example."""
    x, index, source, *rest = args
    inplace = _is_inplace(op)
    if inplace and bdims[0] is None:
        refuse_inplace(op)
    size = level.batch_size
    whole = expand_to_front(x, bdims[0], size)
    values = flatten_logical(whole)
    flat = flatten_logical(expand_to_front(index, bdims[1], size))
    source = flatten_logical(expand_to_front(source, bdims[2], size))
    examples = torch.arange(size, device=x.device).unsqueeze(1)
    out = values.index_put((examples, flat), source, accumulate=bool(rest and rest[0]))
    out = out.view(whole.shape)
    if inplace:
        whole.copy_(out)
        return x, bdims[0]
    return out, 0


def _ordinals(mask: Tensor) -> Tensor:
    """Return, for each element of an example, the number of True mask elements before it.

    For an element outside of the mask, the number is one less.
    """
    return mask.flatten(1).cumsum(1) - 1


@row("aten::masked_scatter", "aten::masked_scatter_")
@refuse_like_torch
def masked_scatter(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The k-th True element of the mask gets the k-th element of the source."""
    x, mask, source = args
    if mask.dtype is not torch.bool or x.dtype is not source.dtype:
        return raise_as_one_example(op, bdims, args, kwargs)
    inplace = _is_inplace(op)
    bdim = bdims[0]
    if inplace and bdim is None:
        refuse_inplace(op)
    size = level.batch_size
    rank, other = logical_rank(x, bdim), logical_rank(mask, bdims[1])
    whole = align_batch_dim(expand_to_front(x, bdim, size), 0, max(rank, other))
    mask = align_batch_dim(expand_to_front(mask, bdims[1], size), 0, max(rank, other))
    whole_x, mask = torch.broadcast_tensors(whole, mask)
    source = at_least_one_entry(flatten_logical(expand_to_front(source, bdims[2], size)))
    flat = flatten_logical(mask)
    enough = source.shape[1]
    if not (isinstance(enough, int) and isinstance(flat.shape[1], int) and enough >= flat.shape[1]):
        message = "masked_scatter: Number of elements of source < number of ones in mask"
        require(flat.count_nonzero(1) <= enough, message)
    order = _ordinals(flat).clamp(0, source.shape[1] - 1)
    out = torch.where(flat, source.gather(1, order), flatten_logical(whole_x))
    out = out.view(whole_x.shape)
    if inplace:
        whole.copy_(out)
        return x, bdim
    return out, 0


@row("aten::masked_scatter_backward")
def masked_scatter_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Collect the gradients at the mask's True elements, in order.

    Gradients at other elements go to an extra column, which is cut off.
    """
    grad, mask, sizes = args
    size = level.batch_size
    top = max(logical_rank(grad, bdims[0]), logical_rank(mask, bdims[1]))
    grad = align_batch_dim(expand_to_front(grad, bdims[0], size), 0, top)
    mask = align_batch_dim(expand_to_front(mask, bdims[1], size), 0, top)
    grad, mask = (flatten_logical(v) for v in torch.broadcast_tensors(grad, mask))
    count = 1
    for extent in sizes:
        count = count * extent
    order = torch.where(mask, _ordinals(mask), count)
    out = grad.new_zeros((size, count + 1)).scatter(1, order, grad)
    return out[:, :count].view(size, *sizes), 0
