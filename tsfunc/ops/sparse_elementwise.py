"""Sums, products and quotients of sparse tensors that torch has no batched kernel for.

The rule of pointwise operators calls this module after the call on physical tensors failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.compressed import (
    BY_ROWS,
    batch_of,
    diagonal,
    is_compressed,
    members,
    of_members,
    with_values,
)
from tsfunc.ops.dims import align, batch_to_front, broadcast_to_front, op_name, unit_dims
from tsfunc.ops.dynamic import refuse_dynamic_size
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel

_SUMS = frozenset({"add", "sub", "subtract"})
_PRODUCTS = frozenset({"mul", "multiply"})
_QUOTIENTS = frozenset({"div", "divide", "true_divide"})


def sparse_elementwise(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Combine two tensors, at least one of them sparse.

    Raises:
        RuntimeError: the current error is raised again if neither is sparse, or for other
            operators.
    """
    name = op_name(op).rpartition("::")[2].partition(".")[0]
    if len(args) != 2 or not any(is_sparse(x) for x in args):
        raise
    (x, y), (p, q) = args, bdims
    size = level.batch_size
    if name in _SUMS:
        if is_sparse(x) and is_sparse(y):
            return _combine_sparse(op, level, bdims, args, kwargs)
        dense = [_dense(x) if p is None else x, _dense(y) if q is None else y]
        aligned, bdim = align(dense, bdims)
        sizes = torch.broadcast_shapes(*[part.shape for part in aligned])
        return op(*[_expand(part, sizes) for part in aligned], **kwargs), bdim
    if name in _PRODUCTS and is_sparse(x) and is_sparse(y):
        return _combine_sparse(op, level, bdims, args, kwargs)
    if name in _PRODUCTS and is_sparse(y):
        (x, p), (y, q) = (y, q), (x, p)
    if name in _PRODUCTS or (name in _QUOTIENTS and not is_sparse(y)):
        return _combine_with_dense(op, batched_sparse(x, p, size), y, q, kwargs), 0
    raise


def is_sparse(x: Any) -> bool:
    """True if the value is a tensor of any sparse layout."""
    return isinstance(x, Tensor) and x.layout is not torch.strided


def is_mixed(x: Any, y: Any) -> bool:
    """True if one is a sparse and the other a dense tensor; torch's products can be wrong then."""
    return isinstance(x, Tensor) and isinstance(y, Tensor) and is_sparse(x) != is_sparse(y)


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if is_compressed(x) or x.is_sparse else x


def _expand(x: Tensor, sizes: Sequence[Any]) -> Tensor:
    if is_compressed(x):
        return x.to_dense()
    return x if x.is_sparse else x.expand(sizes)


def batched_sparse(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Return a sparse tensor with its batch dim first; an unbatched one is copied per example."""
    if is_compressed(x):
        return batch_of(x, bdim, size)
    return batch_to_front(x, bdim) if bdim is not None else torch.stack([x] * size)


def _combine_sparse(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Combine two sparse tensors; compressed matrices are combined as one block-diagonal matrix.

    All examples of a compressed result must store the same number of elements.
    """
    x, y = (
        batched_sparse(arg, bdim, level.batch_size) for arg, bdim in zip(args, bdims, strict=True)
    )
    if is_compressed(x) and is_compressed(y) and x.dim() == y.dim() == 3:
        return _diagonal_blocks(op, op(diagonal(x), diagonal(y), **kwargs), x.shape), 0
    return op(x, y, **kwargs), 0


def _diagonal_blocks(op: Any, x: Tensor, shape: torch.Size) -> Tensor:
    """Return the batch of the diagonal blocks, which must store equal numbers of elements."""
    compressed, plain, values = members(x)
    count = shape[0]
    starts = compressed[:-1].unflatten(0, (count, -1))[:, :1]
    ends = torch.cat([starts[1:], compressed[-1:].unsqueeze(1)])
    stored = (ends - starts).flatten()
    if bool((stored != stored[:1]).any()):
        refuse_dynamic_size(op, "Use to_dense() first")
    inner = compressed[1:].unflatten(0, (count, -1)) - starts
    plain = plain.unflatten(0, (count, -1))
    lines = torch.arange(count, device=plain.device, dtype=plain.dtype).unsqueeze(1)
    wide = shape[2] if x.layout in BY_ROWS else shape[1]
    return of_members(
        torch.cat([torch.zeros_like(inner[:, :1]), inner], 1),
        plain - lines * wide,
        values.unflatten(0, (count, -1)),
        shape,
        x.layout,
    )


def _combine_with_dense(
    op: Any, x: Tensor, y: Tensor, q: int | None, kwargs: Mapping[str, Any]
) -> Tensor:
    """Combine a sparse tensor, batch dim first, with a dense tensor that broadcasts to it."""
    y = broadcast_to_front(y, q)
    if is_compressed(x):
        values = x.values()
        if y.dim() == 1:
            return with_values(x, op(values, unit_dims(y, 1, values.dim() - 1), **kwargs))
        values_of_y = unit_dims(y, 1, x.dim() - y.dim()).expand(x.shape).sparse_mask(x).values()
        return with_values(x, op(values, values_of_y, **kwargs))
    x = x.coalesce()
    y = unit_dims(y, 1, x.dim() - y.dim()).expand(x.shape)
    values_of_y = y[tuple(x.indices())]
    return torch.sparse_coo_tensor(
        x.indices(), op(x.values(), values_of_y, **kwargs), x.shape, is_coalesced=True,
        check_invariants=False,
    )  # fmt: skip
