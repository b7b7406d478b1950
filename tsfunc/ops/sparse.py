"""Sparse tensors: products, and ways from and to dense ones.

A batch of COO tensors is one COO tensor whose batch dim is one of its sparse dims. Other layouts
come as arguments that are the same for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import align, batched_front, front, logical_rank, op_name, wrap
from tsfunc.ops.dynamic import refuse_dynamic
from tsfunc.ops.registry import BatchLevel, Dims, row
from tsfunc.ops.splitting import agree


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


@row("aten::_sparse_sum", "aten::_sparse_sum.dtype")
def sparse_sum_of_all(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A dense number for each example."""
    x = front(args[0], dims[0])
    rest = list(range(1, x.dim()))
    return torch.sparse.sum(x, rest, **kwargs).to_dense() if rest else x.to_dense(), 0


@row("aten::_nnz")
def stored_count(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """How many elements are stored: of each example its own."""
    return _stored(op, level, front(args[0], dims[0]))[0].shape[1], None


@row("aten::indices", "aten::_indices")
def indices(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The places in an example."""
    return _stored(op, level, front(args[0], dims[0]))[0].movedim(2, 1), 0


@row("aten::values", "aten::_values")
def values(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The elements that an example stores."""
    return _stored(op, level, front(args[0], dims[0]))[1], 0


def _stored(op: Any, level: BatchLevel, x: Tensor) -> tuple[Tensor, Tensor]:
    """The places (example, element, dim) and values (example, element, ...), of as many each."""
    if x.layout is not torch.sparse_coo or x.sparse_dim() < 2:
        raise NotImplementedError(
            f"vmap: {op_name(op)} of a batch of tensors of layout {x.layout} with "
            f"{x.sparse_dim() - 1} sparse dims. Call to_dense() or to_sparse() first."
        )
    places, stored = x._indices(), x._values()
    if not x.is_coalesced():
        order = places[0].argsort(stable=True)
        places, stored = places[:, order], stored[order]
    counts = places[0].bincount(minlength=level.batch_size)
    if bool((counts != counts[:1]).any()):
        if level.splitter is None:
            refuse_dynamic(op, "Use to_dense() instead, or examples that store as many elements")
        agree(op, level, counts)
    shape = (level.batch_size, int(counts[0]) if level.batch_size else 0)
    return places[1:].mT.unflatten(0, shape), stored.unflatten(0, shape)


@row("aten::is_coalesced")
def is_coalesced(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The examples are where their batch is."""
    return op(args[0]), None


@row("aten::sparse_dim")
def sparse_dim(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The batch dim is one of them."""
    return op(args[0]) - is_sparse(args[0]), None


@row("aten::dense_dim")
def dense_dim(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """All dims of a tensor that is not sparse."""
    return op(args[0]) - (not is_sparse(args[0])), None


@row("aten::_sparse_coo_tensor_with_dims_and_tensors")
def sparse_coo_tensor(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The index of the example is a further row of the indices."""
    sparse, dense, size, places, stored = args
    count = level.batch_size
    places, stored = batched_front(places, dims[3], count), batched_front(stored, dims[4], count)
    examples = torch.arange(count, device=places.device)[:, None].expand(count, places.shape[2])
    rows_of_all = torch.cat([examples[None], places.movedim(1, 0)]).flatten(1)
    return op(sparse + 1, dense, [count, *size], rows_of_all, stored.flatten(0, 1), **kwargs), 0


@row("aten::sparse_mask")
def sparse_mask(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a tensor has at the places that the mask stores."""
    x, mask = args
    if dims[1] is None:
        mask = torch.stack([mask] * level.batch_size)
    return op(batched_front(x, dims[0], level.batch_size), front(mask, dims[1] or 0)), 0


@row("aten::_to_dense")
def to_dense(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Every dim stays where it is."""
    return op(*args, **kwargs), dims[0]
