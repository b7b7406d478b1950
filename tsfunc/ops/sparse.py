"""Sparse tensors: products, and ways from and to dense ones.

A batch of COO tensors is one COO tensor whose batch dim is one of its sparse dims. Other layouts
come as arguments that are the same for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import align, front, logical_rank, wrap
from tsfunc.ops.registry import BatchLevel, Dims, row


def is_sparse(x: Any) -> bool:
    """Whether it is a tensor of any sparse layout."""
    return isinstance(x, Tensor) and x.layout is not torch.strided


Times = Callable[[Tensor, Tensor], Tensor]


def product(x: Tensor, p: int | None, y: Tensor, q: int | None, times: Times = torch.matmul) -> Any:
    """Of logical values of rank 1 or 2, of which one at least is sparse.

    ``times`` is for a sparse matrix that is not batched: its derivatives are those wanted.
    """
    ranks = logical_rank(x, p), logical_rank(y, q)
    both = is_sparse(x) and is_sparse(y)
    if both or max(ranks) > 2 or ranks[1 if is_sparse(x) else 0] == 0 or 2 not in ranks:
        return NotImplemented
    if is_sparse(x):
        return _times(x, p, y, q, times)
    (y, q), vector = _turned(y, q), ranks[0] == 1
    if vector:
        return _times(y, q, x, p)
    out, at = _times(y, q, *_turned(x, p))
    return front(out, at).transpose(1, 2), 0


def product_instead(x: Tensor, p: int | None, y: Tensor, q: int | None) -> Any:
    """A product of sparse values; called where the one of dense values has failed.

    Raises:
        RuntimeError: what is being handled, where nothing is sparse.
    """
    if not is_sparse(x) and not is_sparse(y):
        raise
    return product(x, p, y, q)


def _turned(x: Tensor, at: int | None) -> tuple[Tensor, int | None]:
    """A matrix with its dims exchanged."""
    return (x.transpose(0, 1), None) if at is None else (front(x, at).transpose(1, 2), 0)


def _times(
    x: Tensor, p: int | None, y: Tensor, q: int | None, times: Times = torch.matmul
) -> tuple[Tensor, int]:
    """A sparse matrix times a dense one or a vector."""
    vector = logical_rank(y, q) == 1
    if p is None:  # the examples are further columns
        assert q is not None
        columns = y.movedim(q, -1)
        out = times(x, columns if vector else columns.flatten(1))
        return (out, 1) if vector else (out.unflatten(1, columns.shape[1:]), 2)
    x = front(x, p)
    y = y.expand(x.shape[0], *y.shape) if q is None else front(y, q)
    out = torch.bmm(x, y.unsqueeze(-1) if vector else y)
    return (out.squeeze(-1) if vector else out), 0


@row("aten::_sparse_mm")
def sparse_mm(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``torch.sparse.mm`` of a sparse and a dense matrix, in either order."""
    return product(args[0], dims[0], args[1], dims[1], op)


@row("aten::_sparse_addmm")
def sparse_addmm(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A multiple of a matrix and one of a product."""
    found = product(args[1], dims[1], args[2], dims[2], torch.sparse.mm)
    if found is NotImplemented:
        return NotImplemented
    out, at = found
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    out = out if alpha == 1 else out * alpha
    if beta == 0:
        return out, at
    (added, out), at = align((args[0], out), (dims[0], at))
    return added * beta + out, at


@row("aten::_sparse_mm.reduce")
def sparse_mm_reduce(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Each column is reduced by itself, so the examples are further columns."""
    if dims[0] is not None:
        return NotImplemented
    columns = args[1].movedim(dims[1], -1)
    out = op(args[0], columns.flatten(1), *args[2:], **kwargs)
    return out.unflatten(1, columns.shape[1:]), 2


@row("aten::_to_sparse.sparse_dim")
def to_sparse_dims(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The batch dim is a further sparse one."""
    return op(front(args[0], dims[0]), args[1] + 1), 0


@row("aten::_to_sparse")
def to_sparse(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compressed layouts have batch dims of their own, which come first too."""
    return op(front(args[0], dims[0]), **kwargs), 0


@row("aten::_sparse_sum.dim")
def sparse_sum(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A result without sparse dims is dense, and so a batch of them."""
    x = front(args[0], dims[0])
    rank = x.dim() - 1
    out = op(x, [wrap(dim, rank) + 1 for dim in args[1]], **kwargs)
    left = set(range(x.sparse_dim() - 1)) - {wrap(dim, rank) for dim in args[1]}
    return (out if left or not is_sparse(out) else out.to_dense()), 0


@row("aten::_sparse_softmax", "aten::_sparse_log_softmax")
def sparse_softmax(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Over what is there of a dim."""
    x = front(args[0], dims[0])
    return op(x, wrap(args[1], x.dim() - 1) + 1, *args[2:], **kwargs), 0
