"""Embeddings: lookup of rows, and sums of gradients by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import batch_to_front, expand_to_front, flat_by_example, refuse_inplace
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def offsets(indices: Tensor, size: Any, step: Any) -> Tensor:
    """Return ``0, step, 2 * step, ...`` for each example, to be added to batched indices."""
    counts = torch.arange(size, device=indices.device, dtype=indices.dtype) * step
    shape = [-1] + [1] * (indices.dim() - 1)
    return counts.view(shape)


@row("aten::embedding")
def embedding(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Batched weights are stacked into one long table."""
    weight, indices, *rest = args
    p, q = bdims[:2]
    size = level.batch_size
    padding, by_frequency = (*rest, *(-1, False)[len(rest) :])[:2]
    if p is None and by_frequency:  # the frequency is counted separately for each example
        weight, p = weight.expand(size, *weight.shape), 0
    if p is None:
        return op(weight, indices, *rest), q
    if weight.dim() != 3 or indices.dtype not in (torch.int64, torch.int32):
        return raise_as_one_example(op, bdims, args, kwargs)
    if q is None:
        if padding >= 0 or by_frequency:
            return _in_long_rows(op, weight.movedim(p, 1), indices, padding, by_frequency)
        return (
            (weight[indices], indices.dim())
            if p == 1
            else (batch_to_front(weight, p)[:, indices], 0)
        )
    weight, indices = batch_to_front(weight, p), batch_to_front(indices, q)
    own_table = indices + offsets(indices, size, weight.shape[1])
    out = op(weight.flatten(0, 1), own_table, -1, by_frequency)
    if 0 <= padding < weight.shape[1]:
        # The padding row of each table has no gradient: look it up in a table of the padding rows.
        only = indices.new_zeros(1)
        row, _ = _in_long_rows(op, weight[:, padding : padding + 1].movedim(0, 1), only, 0, False)
        row = row.view(size, *[1] * (indices.dim() - 1), -1)
        out = torch.where((indices == padding).unsqueeze(-1), row, out)
    return out, 0


def _in_long_rows(
    op: Any, weight: Tensor, indices: Tensor, padding: Any, by_frequency: bool
) -> tuple[Tensor, int]:
    """Look up shared indices in a table whose rows are the concatenated rows of all examples."""
    table = weight.flatten(1)
    out = op(table, indices, padding, by_frequency)
    return out.unflatten(-1, weight.shape[1:]), indices.dim()


@row("aten::embedding_dense_backward")
def embedding_dense_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Sum into one long table; for shared indices, into longer rows."""
    grad, indices, count, padding, by_frequency = args
    size = level.batch_size
    if bdims[1] is None:
        grad = grad.movedim(bdims[0], -2).flatten(-2)
        out = op(grad, indices, count, padding, by_frequency)
        return out.unflatten(1, (size, out.shape[1] // size)), 1
    grad, indices = expand_to_front(grad, bdims[0], size), batch_to_front(indices, bdims[1])
    if padding >= 0:
        grad = grad.masked_fill((indices == padding).unsqueeze(-1), 0)
    indices = indices + offsets(indices, size, count)
    out = op(grad, indices, count * size, -1, by_frequency)
    return out.unflatten(0, (size, count)), 0


@row("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The bags of all examples follow each other, in one long table; gradients are dense."""
    options = [*args, *(False, 0, False, None, False, -1)[len(args) - 3 :]]
    weight, indices, bags, by_frequency, mode, _, scales, last, padding = options
    p, q, r = bdims[:3]
    if weight.requires_grad or (scales is not None and scales.requires_grad):
        # C++ checks requires_grad on the tracer only, not on the value inside of it.
        op = torch.ops.aten._embedding_bag
    size = level.batch_size
    s = bdims[6] if len(bdims) > 6 else None
    indices, bags = expand_to_front(indices, q, size), expand_to_front(bags, r, size)
    if last:  # the last offset is the end of the last bag, which is implied
        bags = bags[:, :-1]
    if p is not None:
        weight = batch_to_front(weight, p)
        own_table = indices + offsets(indices, size, weight.shape[1])
        # A padding index of any table refers to the padding row of the first table.
        indices = torch.where(indices == padding, padding, own_table) if padding >= 0 else own_table
        weight = weight.flatten(0, 1)
    count, entries = bags.shape[1], indices.shape[1]
    bags = (bags + offsets(bags, size, entries)).flatten()
    scales = flat_by_example(scales, s, size)
    out, to_bag, sizes, largest = op(
        weight, indices.flatten(), bags, by_frequency, mode, False, scales, False, padding
    )
    out = out.unflatten(0, (size, count))
    per_example = p is not None and mode == 2
    return _bag_results(size, count, per_example, weight, (out, to_bag, sizes, largest))


def _bag_results(
    size: int, count: int, per_example: bool, weight: Tensor, results: Sequence[Tensor]
) -> Any:
    """Return the kernel's bookkeeping results as they would be for each example."""
    out, to_bag, sizes, largest = results
    bdims: list[int | None] = [0, None, None, None]
    if to_bag.shape[0]:
        to_bag = to_bag.unflatten(0, (size, to_bag.shape[0] // size))
        to_bag, bdims[1] = to_bag - offsets(to_bag, size, count), 0
    if sizes.shape[0]:
        sizes, bdims[2] = sizes.unflatten(0, (size, sizes.shape[0] // size)), 0
    if largest.shape[0]:
        largest, bdims[3] = largest.unflatten(0, (size, largest.shape[0] // size)), 0
        if per_example:
            largest = largest - offsets(largest, size, weight.shape[0] // size)
            largest = largest.clamp(min=0)  # for empty bags the index is 0 in every table
    return (out, to_bag, sizes, largest), tuple(bdims)


def _bag_rows(grad: Tensor, bags: Tensor, indices: Tensor) -> Tensor:
    """Return the row of ``grad`` of each entry's bag."""
    entries = torch.arange(indices.shape[1], device=indices.device).to(bags.dtype)
    entries = entries.expand(indices.shape).contiguous()
    bag = torch.searchsorted(bags.contiguous(), entries, right=True) - 1
    bag = bag.clamp(max=grad.shape[1] - 1)
    return grad.gather(1, bag.unsqueeze(-1).expand(*bag.shape, grad.shape[-1]))


@row("aten::_embedding_bag_backward")
def embedding_bag_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Each entry gets the gradient of its bag; in max mode one entry gets it."""
    grad, indices, bags, _, sizes, largest, count, by_frequency, mode = args[:9]
    scales = args[10] if len(args) > 10 else None
    padding = args[11] if len(args) > 11 else -1
    if by_frequency and mode != 0:
        return NotImplemented
    size = level.batch_size
    grad = expand_to_front(grad, bdims[0], size)
    sizes = expand_to_front(sizes, bdims[4], size)[:, : grad.shape[1]]
    if mode == 2:
        largest = expand_to_front(largest, bdims[5], size)[:, : grad.shape[1]]
        grad = grad.masked_fill((sizes == 0).unsqueeze(-1), 0)
        out = grad.new_zeros((size, count, grad.shape[-1]))
        return out.scatter_add(1, largest, grad), 0
    indices = expand_to_front(indices, bdims[1], size)
    if mode == 1:
        grad = grad / sizes.clamp(min=1).unsqueeze(-1)
    rows = _bag_rows(grad, expand_to_front(bags, bdims[2], size), indices)
    if scales is not None:
        rows = rows * expand_to_front(scales, bdims[10], size).unsqueeze(-1)
    dense = torch.ops.aten.embedding_dense_backward
    return embedding_dense_backward(
        dense, level, (0, 0), (rows, indices, count, padding, by_frequency), {}
    )


@row("aten::_embedding_bag_per_sample_weights_backward")
def embedding_bag_scales_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Return the product of each entry's row and the gradient of its bag."""
    grad, weight, indices, bags = args[:4]
    padding = args[6] if len(args) > 6 else -1
    size = level.batch_size
    indices = expand_to_front(indices, bdims[2], size)
    rows, bdim = embedding(torch.ops.aten.embedding, level, (bdims[1], 0), (weight, indices), {})
    rows = rows.movedim(bdim, 0)
    bags = expand_to_front(bags, bdims[3], size)
    out = (_bag_rows(expand_to_front(grad, bdims[0], size), bags, indices) * rows).sum(-1)
    return (out.masked_fill(indices == padding, 0) if padding >= 0 else out), 0


@row("aten::embedding_renorm_")
def embedding_renorm(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Renormalize the looked-up rows in place."""
    weight, indices, *rest = args
    if bdims[0] is None:
        refuse_inplace(op)
    table = batch_to_front(weight, bdims[0])
    indices = expand_to_front(indices, bdims[1], level.batch_size)
    flat = table.flatten(0, 1)
    op(flat, (indices + offsets(indices, level.batch_size, table.shape[1])).contiguous(), *rest)
    table.copy_(flat.view(table.shape))
    return weight, bdims[0]
