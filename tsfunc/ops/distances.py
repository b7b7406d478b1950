"""Distances between the rows of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    aligned_batches,
    batch_to_front,
    expand_to_front,
    logical_rank,
    physical_dim,
    with_defaults,
)
from tsfunc.ops.refusal import raise_as_one_example, ranks_at_least
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def _align(level: RuleLevel, bdims: BatchDims, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with the batch dim first and equal ranks."""
    return aligned_batches(tensors, bdims, [0] * len(tensors), level.batch_size)


@row("aten::_cdist_forward", "aten::cdist")
def cdist(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Leading dims broadcast."""
    if not ranks_at_least(bdims, args[:2], 2, 2):
        return raise_as_one_example(op, bdims, args, kwargs)
    x, y = _align(level, bdims[:2], args[:2])
    return op(x, y, *args[2:]), 0


@row("aten::_euclidean_dist")
def euclidean_dist(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Leading dims must be equal, so they are expanded."""
    x, y = _align(level, bdims, args)
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return op(x.expand(*lead, *x.shape[-2:]), y.expand(*lead, *y.shape[-2:])), 0


@row("aten::_cdist_backward")
def cdist_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The result has the rows of the first matrix, and the leading dims that both broadcast to."""
    grad, x, y, p, distances = args
    tensors = _align(level, (*bdims[:3], bdims[4]), (grad, x, y, distances))
    unit_shape = [level.batch_size] + [1] * (tensors[0].dim() - 3)
    lead = torch.broadcast_shapes(unit_shape, *(t.shape[:-2] for t in tensors))
    grad, x, y, distances = (t.expand(*lead, *t.shape[-2:]).contiguous() for t in tensors)
    return op(grad, x, y, p, distances), 0


@row("aten::_pdist_forward")
def pdist(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Select the distances above the diagonal from those between all rows."""
    x = batch_to_front(args[0], bdims[0])
    p = args[1] if len(args) > 1 else 2.0
    above = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    return torch.cdist(x, x, p)[:, above[0], above[1]], 0


@row("aten::_pdist_backward")
def pdist_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call cdist's backward with symmetric matrices of gradients and distances."""
    grad, x, p, distances = args
    size = level.batch_size
    x = expand_to_front(x, bdims[1], size).contiguous()
    n = x.shape[1]
    i, j = torch.triu_indices(n, n, 1, device=x.device)
    square = []
    for values, bdim in ((grad, bdims[0]), (distances, bdims[3])):
        half = values.new_zeros((size, n, n))
        half[:, i, j] = expand_to_front(values, bdim, size)
        square.append(half + half.mT)
    return torch.ops.aten._cdist_backward(square[0], x, x, p, square[1]), 0


@row("aten::cosine_similarity")
def cosine_similarity(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Compare tensors that broadcast, along one dim."""
    x, y, dim, eps = with_defaults(args, None, None, 1, 1e-8)
    rank = max(logical_rank(x, bdims[0]), logical_rank(y, bdims[1]))
    if rank == 0:
        return raise_as_one_example(op, bdims, args, kwargs)
    x, y = _align(level, bdims[:2], (x, y))
    return op(x, y, physical_dim(dim, rank, 0), eps), 0
