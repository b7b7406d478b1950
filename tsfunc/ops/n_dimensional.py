"""Operators that move elements: flips, rolls, pads, triangles, and backward operators of views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.channels_last import channels_back, channels_last, channels_moved, moved_dim
from tsfunc.ops.dims import (
    NoExamples,
    batch_to_front,
    every_dim,
    expand_to_front,
    flatten_examples,
    physical_dim,
    physical_dims,
    unit_dims,
    with_defaults,
    wrap_dim,
)
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows
from tsfunc.ops.shifts import Shift, shift_arguments


def fold_leading_dims(x: Tensor) -> Tensor:
    """Flatten the batch dim and the dim after it into one."""
    return x.flatten(0, 1)


@row("aten::repeat")
def repeat(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """New dims come before all logical dims, and after a batch dim that is first."""
    x, bdim = args[0], bdims[0]
    repeats = list(args[1])
    new = len(repeats) - x.dim() + 1
    if bdim == 0:
        x = unit_dims(x, 1, new)
    else:
        bdim += new
    repeats.insert(bdim, 1)
    return op(x, repeats), bdim


@row("aten::tile")
def tile(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Repeat each example, with the number 1 for the dims that have none."""
    times = [*[1] * (args[0].dim() - 1 - len(args[1])), *args[1]]
    return repeat(torch.ops.aten.repeat.default, level, bdims, (args[0], times), kwargs)


@row("aten::flip")
@shift_arguments(Shift.SAME, Shift.DIMS)
def flip(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Flip logical dims. A scalar is cloned."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    if rank == 0:
        for dim in args[1]:
            wrap_dim(dim, 0)
        return x.clone(), bdim
    return op(x, physical_dims(args[1], rank, bdim)), bdim


@row("aten::roll")
@shift_arguments(Shift.FEW, Shift.SAME, Shift.DIMS)
def roll(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Without ``dims``, roll the flattened logical tensor."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    if len(args) > 2 and args[2]:
        if rank == 0:
            raise IndexError(f"Dimension specified as {args[2][0]} but tensor has no dimensions")
        if rank > 3 and channels_last(x, bdim):
            positions = [moved_dim(wrap_dim(dim, rank), rank) for dim in args[2]]
            return channels_back(op(channels_moved(x, bdim), args[1], positions)), 0
        return op(x, args[1], physical_dims(args[2], rank, bdim)), bdim
    return op(flatten_examples(x, bdim), args[1], [1]).reshape(batch_to_front(x, bdim).shape), 0


@row("aten::rot90")
def rot90(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Rotate in the plane of two logical dims."""
    x, bdim = args[0], bdims[0]
    k, plane = with_defaults(args[1:], 1, (0, 1))
    return op(x, k, physical_dims(plane, x.dim() - 1, bdim)), bdim


def triangle(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The matrices are the last two dims, so the batch dim must come before them."""
    x, bdim = args[0], bdims[0]
    if bdim > x.dim() - 3:
        x, bdim = batch_to_front(x, bdim), 0
    if x.dim() < 3:
        return NotImplemented
    return op(x, *args[1:]), bdim


def triangle_inplace(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Write through a view that has the batch dim first."""
    if args[0].dim() < 3:
        return NotImplemented
    triangle(op, level, bdims, args, kwargs)
    return args[0], bdims[0]


@row("aten::constant_pad_nd")
def constant_pad_nd(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The last dims are padded, so the batch dim must come before them."""
    x, bdim = args[0], bdims[0]
    padded = len(args[1]) // 2
    if padded >= x.dim():
        raise RuntimeError(
            f"Length of pad should be no more than twice the number of dimensions of the input. "
            f"Pad length is {len(args[1])} while the input has {x.dim() - 1} dimensions."
        )
    if x.dim() > 4 and channels_last(x, bdim):
        pad = [*args[1], *[0] * (2 * (x.dim() - 1 - padded))]
        # Pairs start from the last dim. With channels last, the channels' pair precedes the
        # spatial pairs.
        pad = [*pad[-4:-2], *pad[:-4], *pad[-2:]]
        return channels_back(op(channels_moved(x, bdim), pad, *args[2:])), 0
    if bdim >= x.dim() - padded:
        x, bdim = batch_to_front(x, bdim), 0
    return op(x, *args[1:]), bdim


@row("aten::pad")
def pad(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Constant mode only; other modes run by decomposition."""
    x, sizes, mode, value = with_defaults(args, None, None, "constant", None)
    if mode != "constant":
        return NotImplemented
    constant = torch.ops.aten.constant_pad_nd.default
    return constant_pad_nd(constant, level, bdims, (x, sizes, value or 0.0), kwargs)


def edge_pad(spatial: int) -> Rule:
    """Return the rule of a pad that takes ``spatial`` dims, a channel dim and a batch dim."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        tensors = len(bdims) - 1
        size = level.batch_size
        values = [expand_to_front(args[i], bdims[i], size) for i in range(tensors)]
        if values[0].dim() == spatial + 2:
            return op(*values, args[tensors]), 0
        outer = values[0].shape[1]
        out = op(*[fold_leading_dims(value) for value in values], args[tensors])
        return out.unflatten(0, (size, outer)), 0

    return rule


@row("aten::diag_embed")
def diag_embed(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """``dim1`` and ``dim2`` are dims of the result, which has one dim more than the argument."""
    x = batch_to_front(args[0], bdims[0])
    offset, dim1, dim2 = with_defaults(args[1:], 0, -2, -1)
    first, second = physical_dims((dim1, dim2), x.dim(), 0)
    return op(x, offset, first, second), 0


@row("aten::trace")
def trace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the sum of the diagonal."""
    x, bdim = args[0], bdims[0]
    if x.dim() != 3:
        raise RuntimeError(f"trace: expected a matrix, but got a tensor with dim {x.dim() - 1}")
    return torch.diagonal(x, 0, *every_dim(2, bdim)).sum(-1), 0


@row("aten::select_backward")
@shift_arguments(Shift.SAME, Shift.SIZES, Shift.NEW_DIM)
def select_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Insert the selected dim, as unsqueeze does."""
    grad, sizes, dim, index = args
    bdim = bdims[0]
    dim = wrap_dim(dim, len(sizes))
    bdim, dim = (bdim + 1, dim) if dim < bdim else (bdim, dim + 1)
    physical = list(sizes)
    physical.insert(bdim, level.batch_size)
    return op(grad, physical, dim, index), bdim


@row("aten::slice_backward")
@shift_arguments(Shift.SAME, Shift.SIZES, Shift.DIM)
def slice_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The result has the rank of the gradient."""
    grad, sizes, dim = args[:3]
    bdim = bdims[0]
    physical = list(sizes)
    physical.insert(bdim, level.batch_size)
    return op(grad, physical, physical_dim(dim, len(sizes), bdim), *args[3:]), bdim


@row("aten::diagonal_backward")
@shift_arguments(Shift.SAME, Shift.SIZES, Shift.SAME, Shift.NEW_DIM, Shift.NEW_DIM)
def diagonal_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """``dim1`` and ``dim2`` are dims of the input."""
    grad, sizes, offset, dim1, dim2 = args
    grad = batch_to_front(grad, bdims[0])
    first, second = physical_dims((dim1, dim2), len(sizes), 0)
    return op(grad, [level.batch_size, *sizes], offset, first, second), 0


@row("aten::unfold_backward")
def unfold_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """``dim`` is a dim of the input. A scalar input has one window."""
    grad, sizes, dim, size, step = args
    grad = batch_to_front(grad, bdims[0])
    if not sizes:
        return grad.sum(1), 0
    dim = physical_dim(dim, len(sizes), 0)
    return op(grad, [level.batch_size, *sizes], dim, size, step), 0


def _pair(level: RuleLevel, bdims: BatchDims, args: Args) -> tuple[Tensor, Tensor]:
    """Return the target and the source of a scatter, both with the batch dim first."""
    size = level.batch_size
    return expand_to_front(args[0], bdims[0], size), expand_to_front(args[1], bdims[1], size)


@row("aten::select_scatter", "aten::slice_scatter")
def scatter_dim(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Write along one logical dim of the target."""
    x, source = _pair(level, bdims, args)
    dim = physical_dim(args[2] if len(args) > 2 else 0, x.dim() - 1, 0)
    return op(x, source, dim, *args[3:]), 0


@row("aten::diagonal_scatter")
def diagonal_scatter(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Write along a diagonal of two logical dims of the target."""
    x, source = _pair(level, bdims, args)
    offset, dim1, dim2 = with_defaults(args[2:], 0, 0, 1)
    return op(x, source, offset, *physical_dims((dim1, dim2), x.dim() - 1, 0)), 0


@row("aten::pixel_shuffle", "aten::pixel_unshuffle")
@refuse_like_torch
def pixel_shuffle(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The kernel accepts any dims before the last three; only four dims can be channels-last.

    Raises:
        NoExamples: the batch is empty; the kernel does nothing without elements.
    """
    if not level.batch_size:
        raise NoExamples
    x = batch_to_front(args[0], bdims[0])
    if x.dim() != 5:
        return op(x, args[1]), 0
    return op(fold_leading_dims(x), args[1]).unflatten(0, x.shape[:2]), 0


@row("aten::channel_shuffle", "aten::native_channel_shuffle")
@refuse_like_torch
def channel_shuffle(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The kernel takes one dim before the channels."""
    x = batch_to_front(args[0], bdims[0])
    return op(fold_leading_dims(x), args[1]).unflatten(0, x.shape[:2]), 0


rows(triangle, "aten::tril", "aten::triu")
rows(triangle_inplace, "aten::tril_", "aten::triu_")
for _n in (1, 2, 3):
    rows(
        edge_pad(_n),
        f"aten::reflection_pad{_n}d",
        f"aten::reflection_pad{_n}d_backward",
        f"aten::replication_pad{_n}d",
        f"aten::replication_pad{_n}d_backward",
    )


@row("aten::repeat_interleave.self_int")
def repeat_interleave(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Without ``dim``, repeat the elements of the flattened logical tensor."""
    x, bdim = args[0], bdims[0]
    dim = args[2] if len(args) > 2 else None
    if dim is not None and x.dim() == 1:
        raise_as_one_example(op, bdims, args, kwargs)  # torch rejects a dim for a scalar
    if dim is None or x.dim() == 1:
        return op(flatten_examples(x, bdim), args[1], 1, **kwargs), 0
    return op(x, args[1], physical_dim(dim, x.dim() - 1, bdim), **kwargs), bdim
