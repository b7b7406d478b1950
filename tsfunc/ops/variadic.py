"""Operators on lists of tensors: the batch dims are moved to the same position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.channels_last import channels_back, channels_last, channels_moved, moved_dim
from tsfunc.ops.dims import (
    batches_first,
    broadcast_to_front,
    logical_rank,
    physical_dim,
    unit_dims,
    wrap_dim,
)
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row
from tsfunc.ops.shifts import Shift, shift_arguments


def align_batch_dims(
    tensors: Sequence[Tensor], bdims: Sequence[int | None], size: int
) -> tuple[Sequence[Tensor], int]:
    """Return the tensors with one common batch dim, and that dim. Equal dims are unchanged."""
    bdim = bdims[0]
    if bdim is not None and bdims.count(bdim) == len(bdims):
        return tensors, bdim
    return batches_first(tensors, bdims, size), 0


def _without_empty(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leave out empty vectors, which cat accepts besides tensors of any rank."""
    rank = max([x.dim() for x in tensors])
    return [x for x in tensors if x.dim() == rank or x.dim() != 2 or x.numel() > 0]


@row("aten::cat", "aten::concat", "aten::concatenate")
@shift_arguments(Shift.FEW, Shift.DIM)
def cat(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Concatenate along one logical dim."""
    tensors, bdim = align_batch_dims(args[0], bdims[0], level.batch_size)
    ranks = [x.dim() for x in tensors]
    rank = max(ranks)
    if min(ranks) != rank:
        # The ranks differ, so only the first position is the same in all tensors.
        tensors, bdim = _without_empty(batches_first(args[0], bdims[0], level.batch_size)), 0
    if rank == 1:
        raise RuntimeError("zero-dimensional tensor (at position 0) cannot be concatenated")
    dim = args[1] if len(args) > 1 else 0
    if rank > 4 and all(channels_last(x, bdim) for x in tensors):
        return _cat_channels_last(tensors, bdim, wrap_dim(dim, rank - 1)), 0
    return op(tensors, physical_dim(dim, rank - 1, bdim)), bdim


def _cat_channels_last(tensors: Sequence[Tensor], bdim: int, dim: int) -> Tensor:
    moved = [channels_moved(x, bdim) for x in tensors]
    return channels_back(torch.cat(moved, moved_dim(dim, tensors[0].dim() - 1)))


@row("aten::stack", "aten::_stack")
@shift_arguments(Shift.FEW, Shift.NEW_DIM)
def stack(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A new dim at the position of the batch dim is inserted after the batch dim."""
    tensors, bdim = align_batch_dims(args[0], bdims[0], level.batch_size)
    rank = tensors[0].dim()
    dim = wrap_dim(args[1] if len(args) > 1 else 0, rank)
    if rank > 4 and dim < rank - 1 and all(channels_last(x, bdim) for x in tensors):
        out = _cat_channels_last(tensors, bdim, dim)
        return out.unflatten(dim + 1, (len(tensors), -1)), 0
    return (op(tensors, dim), bdim + 1) if dim < bdim else (op(tensors, dim + 1), bdim)


@row("aten::block_diag")
def block_diag(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Pad each block to the width of the result and concatenate the blocks."""
    if any(logical_rank(x, bdim) > 2 for x, bdim in zip(args[0], bdims[0], strict=True)):
        return raise_as_one_example(op, bdims, args, kwargs)
    tensors = batches_first(args[0], bdims[0], level.batch_size)
    blocks = [unit_dims(x, 1, 3 - x.dim()) for x in tensors]
    width: Any = sum([x.shape[2] for x in blocks])
    padded: list[Tensor] = []
    left: Any = 0
    for x in blocks:
        padded.append(torch.constant_pad_nd(x, [left, width - left - x.shape[2]]))
        left = left + x.shape[2]
    return torch.cat(padded, 1), 0


@row("aten::broadcast_tensors")
def broadcast_tensors(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Unbatched tensors are broadcast over the batch dim too."""
    pairs = list(zip(args[0], bdims[0], strict=True))
    rank = max([logical_rank(x, bdim) for x, bdim in pairs])
    leading = [broadcast_to_front(x, bdim) for x, bdim in pairs]
    return op([unit_dims(x, 1, rank + 1 - x.dim()) for x in leading]), 0
