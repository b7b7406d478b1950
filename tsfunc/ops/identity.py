"""Operators whose result has the elements, or just the shape, of their first argument."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    align,
    align_batch_dim,
    batch_to_front,
    expand_at,
    flatten_logical,
    logical_shape,
    refuse_inplace,
)
from tsfunc.ops.registry import Args, BatchDims, Family, Kwargs, RuleLevel, row
from tsfunc.ops.shifts import Shift, shift_arguments

COPIES: Final = Family()
"""Operators that copy a tensor or compare tensors by their metadata."""

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@shift_arguments(Shift.SAME)
def same_shape(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Operators on one tensor and numbers, in place or not: the batch dim stays."""
    return op(*args, **kwargs), bdims[0]


@shift_arguments(Shift.SAME)
def same_layout(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Operators on one tensor with a memory format, which applies to each example."""
    x, bdim = args[0], bdims[0]
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    if memory_format is None or memory_format is torch.preserve_format:
        return op(*args, **kwargs), bdim
    if memory_format in _CHANNELS_LAST:
        spatial = 2 if memory_format is torch.channels_last else 3
        if x.dim() != spatial + 3:
            raise RuntimeError(f"required rank {spatial + 2} tensor to use {memory_format} format")
        # Make a contiguous tensor with the channels last, then move the channels' dim back by a
        # view.
        kwargs = {**kwargs, "memory_format": torch.contiguous_format}
        return op(batch_to_front(x, bdim).movedim(2, -1), *args[1:], **kwargs).movedim(-1, 2), 0
    # The batch dim goes first: otherwise the examples of a contiguous batch are not contiguous.
    return op(batch_to_front(x, bdim), *args[1:], **kwargs), 0


@COPIES.row("aten::contiguous")
def contiguous(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Copy the batch into the memory format, unless each example has it."""
    memory_format = kwargs.get("memory_format", torch.contiguous_format)
    if memory_format not in _CHANNELS_LAST:
        return batch_to_front(args[0], bdims[0]).contiguous(), 0
    return same_layout(torch.clone, level, bdims, args, kwargs)


@row("aten::_fw_primal", "aten::_fw_primal_copy")
def primal(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return an alias of the value without this level's tangent, which the tracer holds."""
    return torch.ops.aten.alias(args[0]), bdims[0]


@COPIES.row("aten::to.dtype")
def to_dtype(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Cast without a memory format. With one, the decomposition handles it."""
    return NotImplemented if len(args) > 4 else (op(*args), bdims[0])


@COPIES.row("aten::copy_")
@shift_arguments(Shift.SAME, Shift.SAME)
def copy_inplace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Broadcast the source and cast it to the dtype of the target."""
    x, bdim = args[0], bdims[0]
    if bdim is None:
        refuse_inplace(op)
    op(x, _aligned_source(args[1], bdims[1], x.dim() - 1 - bdim), *args[2:])
    return x, bdim


@COPIES.row("aten::copy")
def copy(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the source in the shape and dtype of the target, which may be unbatched."""
    x, bdim = args[0], bdims[0]
    if bdim is None:
        x, bdim = expand_at(x, None, level.batch_size, 0), 0
    return op(x, _aligned_source(args[1], bdims[1], x.dim() - 1 - bdim), *args[2:]), bdim


def _aligned_source(source: Any, bdim: int | None, right: int) -> Any:
    """Align the source of the copy; a number, as in ``x.copy_(2)``, is left as it is."""
    return align_batch_dim(source, bdim, right) if isinstance(source, torch.Tensor) else source


@COPIES.row("aten::fill_.Tensor")
def fill_inplace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A batched fill value is copied into the tensor."""
    x, value = args
    bdim = bdims[0]
    if bdim is None:
        refuse_inplace(op)
    if bdims[1] is None:
        op(x, value)
    else:
        x.copy_(align_batch_dim(value, bdims[1], x.dim() - 1 - bdim))
    return x, bdim


@COPIES.row("aten::fill.Tensor")
def fill(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The result depends only on the shape and dtype of the first argument."""
    x, value = args
    if bdims[1] is None:
        return op(x, value), bdims[0]
    (x, value), bdim = align((x, value), bdims)
    x, value = torch.broadcast_tensors(x, value)
    return torch.ops.aten.copy(x, value), bdim


@COPIES.row("aten::_new_zeros_with_same_feature_meta")
def new_zeros_with_same_feature_meta(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Return zeros for a tangent (the first argument), with the strides of the primal.

    The zeros have every batch dim of the tangent, because the tangent is written into them. The
    first ``self_num_batch_dims`` dims of the tangent are the dims that the primal lacks. A primal
    whose examples share memory counts as one without the batch dim: zeros with its strides would
    share memory too, and could not be written.
    """
    (tangent, primal), (bdim, primal_bdim) = args, bdims
    count = kwargs.get("self_num_batch_dims", 0)
    if primal_bdim is not None and primal.stride(primal_bdim) == 0:
        if bdim is None:
            tangent, bdim = expand_at(tangent, None, level.batch_size, count), count
        primal, primal_bdim = primal.select(primal_bdim, 0), None
    if bdim is None:
        return op(tangent, batch_to_front(primal, primal_bdim), self_num_batch_dims=count), count
    if primal_bdim is None:
        return op(batch_to_front(tangent, bdim), primal, self_num_batch_dims=count + 1), 0
    tangent = tangent.movedim(bdim, count)
    return op(tangent, batch_to_front(primal, primal_bdim), self_num_batch_dims=count), count


@COPIES.row("aten::_has_same_storage_numel")
def has_same_storage_numel(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Return True: forward mode guards against views of larger storages, which no example is."""
    return True, None


@COPIES.row("aten::is_same_size")
def is_same_size(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Compare the logical sizes."""
    return logical_shape(args[0], bdims[0]) == logical_shape(args[1], bdims[1]), None


COPIES.rows(
    same_shape,
    "aten::alias",
    "aten::alias_copy",
    "aten::detach",
    "aten::detach_",
    "aten::detach_copy",
    "aten::lift",
    "aten::lift_fresh",
    "aten::lift_fresh_copy",
    "aten::_lazy_clone",
    "aten::_conj",
    "aten::_conj_copy",
    "aten::_neg_view",
    "aten::_neg_view_copy",
    "aten::conj",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::pin_memory",
    "aten::_pin_memory",
    "aten::fill.Scalar",
    "aten::fill_.Scalar",
    "aten::zero",
    "aten::zero_",
)
COPIES.rows(same_layout, "aten::clone", "aten::_to_copy", "aten::to.dtype_layout")
COPIES.rows(
    same_layout, "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like"
)


@COPIES.row("aten::resize", "aten::resize_")
def resize(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Each example keeps its first elements in memory order.

    Raises:
        RuntimeError: the elements of an example are not in their logical order in memory.
    """
    x = batch_to_front(args[0], bdims[0])
    if list(x.shape[1:]) == list(args[1]) and kwargs.get("memory_format") is None:
        return x, 0  # keeps the layout of the tensor
    steps = x.stride()[1:]
    if any(first < second for first, second in itertools.pairwise(steps)):
        raise RuntimeError(
            "vmap: resize_ is for tensors whose elements lie in memory in their own order. Use "
            "x.contiguous() first, or x.reshape(...) or x.new_empty(...) instead."
        )
    return _resize(x, args[1], kwargs.get("memory_format")), 0


def _resize(x: Tensor, size: Sequence[Any], memory_format: torch.memory_format | None) -> Tensor:
    old = flatten_logical(x)
    count = math.prod(size)
    if count <= old.shape[1]:
        new = old.narrow(1, 0, count)
    else:
        new = torch.cat([old, x.new_empty(x.shape[0], count - old.shape[1])], 1)
    if memory_format in _CHANNELS_LAST:
        # The channels come last in memory.
        return new.unflatten(1, [size[0], *size[2:], size[1]]).movedim(-1, 2)
    return new.reshape(x.shape[0], *size)
