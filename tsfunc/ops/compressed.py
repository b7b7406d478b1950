"""Sparse tensors in compressed layouts (CSR, CSC, BSR, BSC), whose leading dims are the batch.

NOTE [block-diagonal matrices]
A batched tensor in a compressed layout stores the same number of elements for each example, and
its batch dims come first. torch has few kernels for batched ones, so the kernels for matrices are
used: the matrices of the examples become the diagonal blocks of one matrix, or, if all examples
share the other factor, they are stacked vertically. The elements share memory with the batch, only
the indices are recomputed, and a product is one kernel call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import batches_first, expand_to_front
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row

BY_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
LAYOUTS = frozenset({*BY_ROWS, torch.sparse_csc, torch.sparse_bsc})


def is_compressed(x: Any) -> bool:
    """True if the value is a tensor of a compressed layout."""
    return isinstance(x, Tensor) and x.layout in LAYOUTS


def members(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the compressed indices, the plain indices and the elements of a tensor."""
    if x.layout in BY_ROWS:
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


def of_members(
    compressed: Tensor, plain: Tensor, values: Tensor, size: Sequence[Any], layout: torch.layout
) -> Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, list(size), layout=layout, check_invariants=False
    )


def check_batch(x: Tensor) -> None:
    """Check that all members have the same batch dims.

    torch's sum of two batches returns members with unequal batch dims: it sums the first examples
    only.

    Raises:
        NotImplementedError: the batch dims differ.
    """
    compressed, plain, _ = members(x)
    if plain.shape[:-1] != compressed.shape[:-1]:
        raise NotImplementedError(
            f"vmap: torch has no kernel of this operator for two batches of tensors of layout "
            f"{x.layout}. Call to_sparse(), which has, or to_dense() first."
        )


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with the same indices and other elements."""
    compressed, plain, _ = members(x)
    return of_members(compressed, plain, values, x.shape, x.layout)


def batch_of(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Return the tensor with its batch dim first.

    An unbatched matrix is copied for each example.
    """
    if bdim is not None:
        return x
    parts = [part.expand(size, *part.shape).contiguous() for part in members(x)]
    compressed, plain, values = parts
    return of_members(compressed, plain, values, (size, *x.shape), x.layout)


def select_examples(x: Tensor, positions: Tensor) -> Tensor:
    compressed, plain, values = (part.index_select(0, positions) for part in members(x))
    return of_members(compressed, plain, values, (len(positions), *x.shape[1:]), x.layout)


def concatenate(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches whose examples store the same number of elements."""
    parts = [torch.cat(part) for part in zip(*map(members, batches), strict=True)]
    compressed, plain, values = parts
    first = batches[0]
    return of_members(compressed, plain, values, (len(compressed), *first.shape[1:]), first.layout)


def _lines(x: Tensor, plain: Tensor, values: Tensor) -> int:
    """Return the number of rows or columns that the plain indices address."""
    elements = values.dim() - plain.dim()  # dims of a block, if there are blocks
    by_rows = x.layout in BY_ROWS
    size: int = x.shape[plain.dim()] if by_rows else x.shape[plain.dim() - 1]
    return size // values.shape[plain.dim() + by_rows] if elements >= 2 else size


def _consecutive_indices(compressed: Tensor, stored: int) -> Tensor:
    """Return the compressed indices of matrices that follow each other."""
    ends = compressed[:, 1:] + stored * torch.arange(
        len(compressed), device=compressed.device, dtype=compressed.dtype
    ).unsqueeze(1)
    return torch.cat([ends.new_zeros(1), ends.flatten()])


def diagonal(x: Tensor) -> Tensor:
    """Return one block-diagonal matrix of a batch of matrices: NOTE [block-diagonal matrices]."""
    compressed, plain, values = members(x)
    count = compressed.shape[0]
    first = torch.arange(count, device=plain.device, dtype=plain.dtype).unsqueeze(1)
    return of_members(
        _consecutive_indices(compressed, plain.shape[1]),
        (plain + first * _lines(x, plain, values)).flatten(),
        values.flatten(0, 1),
        (count * x.shape[1], count * x.shape[2]),
        x.layout,
    )


def stacked_rows(x: Tensor) -> Tensor:
    """Return one matrix of a batch of matrices stacked vertically; the layout compresses rows."""
    compressed, plain, values = members(x)
    return of_members(
        _consecutive_indices(compressed, plain.shape[1]),
        plain.flatten(),
        values.flatten(0, 1),
        (x.shape[0] * x.shape[1], x.shape[2]),
        x.layout,
    )


def as_one_matrix(x: Tensor, y: Tensor, q: int | None) -> tuple[Tensor, Tensor]:
    """Return one matrix in place of the batch, and the other factor, for a single product."""
    if x.dim() != 3:
        raise NotImplementedError(
            f"vmap: a product of a batch of tensors of layout {x.layout} and rank {x.dim() - 1}. "
            f"Call to_dense() first."
        )
    if q is None and x.layout in BY_ROWS:
        return stacked_rows(x), y
    return diagonal(x), expand_to_front(y, q, x.shape[0]).flatten(0, 1)


@row(
    "aten::crow_indices", "aten::col_indices", "aten::ccol_indices", "aten::row_indices",
    "aten::crow_indices_copy", "aten::col_indices_copy", "aten::ccol_indices_copy",
    "aten::row_indices_copy",
)  # fmt: skip
def indices(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the indices; their batch dims are those of the tensor."""
    return op(args[0]), bdims[0]


@row("aten::sparse_compressed_tensor.comp_plain_value_size")
def sparse_compressed_tensor(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Members with batch dims make a tensor with batch dims."""
    parts = [
        expand_to_front(part, bdim, level.batch_size).contiguous()
        for part, bdim in zip(args[:3], bdims[:3], strict=True)
    ]
    return op(*parts, [level.batch_size, *args[3]], *args[4:], **kwargs), 0


@row("aten::sparse_sampled_addmm")
def sparse_sampled_addmm(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The kernel requires the same batch size of all arguments."""
    size = level.batch_size
    x, y = batches_first(args[1:], bdims[1:], size)
    return op(batch_of(args[0], bdims[0], size), x, y, **kwargs), 0


def stack_examples(results: Sequence[Tensor]) -> Tensor:
    """Stack sparse tensors of the same compressed layout, shape and number of elements."""
    parts = [torch.stack(part) for part in zip(*map(members, results), strict=True)]
    compressed, plain, values = parts
    first = results[0]
    return of_members(compressed, plain, values, (len(results), *first.shape), first.layout)
