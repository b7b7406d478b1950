"""Sparse tensors in compressed layouts (CSR, CSC, BSR, BSC), whose leading dims are a batch.

NOTE [one matrix of many]
A batch in such a layout stores as many elements for each example, and its batch dims come first.
torch has few kernels for one. Those for matrices serve it: the examples' matrices are the blocks on
the diagonal of one matrix, or, where they share the other factor, lie below each other in it. The
elements are the same memory, only the indices are counted anew, and a product is one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import batched_front
from tsfunc.ops.registry import BatchLevel, Dims, row

BY_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
LAYOUTS = frozenset({*BY_ROWS, torch.sparse_csc, torch.sparse_bsc})


def is_compressed(x: Any) -> bool:
    """Whether it is a tensor of a compressed layout."""
    return isinstance(x, Tensor) and x.layout in LAYOUTS


def members(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed indices, the plain ones, and the elements."""
    if x.layout in BY_ROWS:
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


def of_members(
    compressed: Tensor, plain: Tensor, values: Tensor, size: Sequence[Any], layout: torch.layout
) -> Tensor:
    """What has these members."""
    return torch.sparse_compressed_tensor(
        compressed, plain, values, list(size), layout=layout, check_invariants=False
    )


def check_batch(x: Tensor) -> None:
    """Whether all members have the same batch dims.

    Those of torch's sum of two batches have not: it adds up the first examples only.

    Raises:
        NotImplementedError: they have not.
    """
    compressed, plain, _ = members(x)
    if plain.shape[:-1] != compressed.shape[:-1]:
        raise NotImplementedError(
            f"vmap: torch has no kernel of this operator for two batches of tensors of layout "
            f"{x.layout}. Call to_sparse(), which has, or to_dense() first."
        )


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Other elements at the places of those that are stored."""
    compressed, plain, _ = members(x)
    return of_members(compressed, plain, values, x.shape, x.layout)


def batch_of(x: Tensor, at: int | None, size: int) -> Tensor:
    """The value with its batch dim first; a matrix that has none is written out for all."""
    if at is not None:
        return x
    parts = [part.expand(size, *part.shape).contiguous() for part in members(x)]
    compressed, plain, values = parts
    return of_members(compressed, plain, values, (size, *x.shape), x.layout)


def taken(x: Tensor, places: Tensor) -> Tensor:
    """Some of the examples."""
    compressed, plain, values = (part.index_select(0, places) for part in members(x))
    return of_members(compressed, plain, values, (len(places), *x.shape[1:]), x.layout)


def put_together(batches: Sequence[Tensor]) -> Tensor:
    """The examples of several batches, that store as many elements each."""
    parts = [torch.cat(part) for part in zip(*map(members, batches), strict=True)]
    compressed, plain, values = parts
    first = batches[0]
    return of_members(compressed, plain, values, (len(compressed), *first.shape[1:]), first.layout)


def _lines(x: Tensor, plain: Tensor, values: Tensor) -> int:
    """How many places the plain indices count."""
    elements = values.dim() - plain.dim()  # dims of a block, if there are blocks
    by_rows = x.layout in BY_ROWS
    size: int = x.shape[plain.dim()] if by_rows else x.shape[plain.dim() - 1]
    return size // values.shape[plain.dim() + by_rows] if elements >= 2 else size


def _following(compressed: Tensor, stored: int) -> Tensor:
    """The compressed indices of matrices that follow each other."""
    ends = compressed[:, 1:] + stored * torch.arange(
        len(compressed), device=compressed.device, dtype=compressed.dtype
    ).unsqueeze(1)
    return torch.cat([ends.new_zeros(1), ends.flatten()])


def diagonal(x: Tensor) -> Tensor:
    """One matrix with those of a batch as blocks on its diagonal: NOTE [one matrix of many]."""
    compressed, plain, values = members(x)
    count = compressed.shape[0]
    first = torch.arange(count, device=plain.device, dtype=plain.dtype).unsqueeze(1)
    return of_members(
        _following(compressed, plain.shape[1]),
        (plain + first * _lines(x, plain, values)).flatten(),
        values.flatten(0, 1),
        (count * x.shape[1], count * x.shape[2]),
        x.layout,
    )


def below_each_other(x: Tensor) -> Tensor:
    """One matrix with those of a batch below each other; the layout compresses rows."""
    compressed, plain, values = members(x)
    return of_members(
        _following(compressed, plain.shape[1]),
        plain.flatten(),
        values.flatten(0, 1),
        (x.shape[0] * x.shape[1], x.shape[2]),
        x.layout,
    )


def one_matrix(x: Tensor, y: Tensor, q: int | None) -> tuple[Tensor, Tensor]:
    """What to multiply instead of a batch, and the other factor, batched or not."""
    if x.dim() != 3:
        raise NotImplementedError(
            f"vmap: a product of a batch of tensors of layout {x.layout} and rank {x.dim() - 1}. "
            f"Call to_dense() first."
        )
    if q is None and x.layout in BY_ROWS:
        return below_each_other(x), y
    return diagonal(x), batched_front(y, q, x.shape[0]).flatten(0, 1)


@row(
    "aten::crow_indices", "aten::col_indices", "aten::ccol_indices", "aten::row_indices",
    "aten::crow_indices_copy", "aten::col_indices_copy", "aten::ccol_indices_copy",
    "aten::row_indices_copy",
)  # fmt: skip
def indices(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """They have the batch dims that the tensor has."""
    return op(args[0]), dims[0]


@row("aten::sparse_compressed_tensor.comp_plain_value_size")
def sparse_compressed_tensor(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Members with batch dims make a tensor with batch dims."""
    parts = [
        batched_front(part, dim, level.batch_size).contiguous()
        for part, dim in zip(args[:3], dims[:3], strict=True)
    ]
    return op(*parts, [level.batch_size, *args[3]], *args[4:], **kwargs), 0


@row("aten::sparse_sampled_addmm")
def sparse_sampled_addmm(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The kernel takes batches, of the same size each."""
    size = level.batch_size
    x, y = (batched_front(arg, dim, size) for arg, dim in zip(args[1:], dims[1:], strict=True))
    return op(batch_of(args[0], dims[0], size), x, y, **kwargs), 0


def stacked(results: Sequence[Tensor]) -> Tensor:
    """A batch of sparse tensors of one compressed layout, shape, and number of elements."""
    parts = [torch.stack(part) for part in zip(*map(members, results), strict=True)]
    compressed, plain, values = parts
    first = results[0]
    return of_members(compressed, plain, values, (len(results), *first.shape), first.layout)
