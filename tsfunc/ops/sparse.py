"""Sparse tensors: products, and conversions from and to dense tensors.

A batch of COO tensors is one COO tensor whose batch dim is one of its sparse dims. Compressed
layouts have separate batch dims (``compressed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.compressed import (
    as_one_matrix,
    batch_of,
    diagonal,
    is_compressed,
    members,
    of_members,
    with_values,
)
from tsfunc.ops.dims import (
    align,
    batch_to_front,
    expand_to_front,
    function_name,
    logical_rank,
    op_name,
    wrap_dim,
)
from tsfunc.ops.dynamic import refuse_dynamic_size
from tsfunc.ops.refusal import refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row
from tsfunc.ops.sparse_elementwise import batched_sparse, is_sparse
from tsfunc.ops.splitting import check_equal_rows

Times = Callable[[Tensor, Tensor], Tensor]


def product_with_sparse(
    x: Tensor, p: int | None, y: Tensor, q: int | None, times: Times = torch.matmul
) -> Any:
    """Return the product of logical tensors of rank 1 or 2, at least one of them sparse.

    ``times`` multiplies by an unbatched sparse matrix. Its derivatives are those of the operator.
    """
    ranks = logical_rank(x, p), logical_rank(y, q)
    if ranks == (2, 2) and _is_coo(x) and _is_coo(y):
        return _product_of_batches(x, p, y, q)
    both = is_sparse(x) and is_sparse(y)
    if both or max(ranks) > 2 or ranks[1 if is_sparse(x) else 0] == 0 or 2 not in ranks:
        return NotImplemented
    if is_sparse(x):
        return _times(x, p, y, q, times)
    (y, q), vector = _transpose(y, q), ranks[0] == 1
    if vector:
        return _times(y, q, x, p)
    out, bdim = _times(y, q, *_transpose(x, p))
    return batch_to_front(out, bdim).transpose(1, 2), 0


def _is_coo(x: Tensor) -> bool:
    return x.layout is torch.sparse_coo and not x.dense_dim()


def _product_of_batches(x: Tensor, p: int | None, y: Tensor, q: int | None) -> tuple[Tensor, int]:
    """Multiply two batches of sparse matrices as two block-diagonal matrices."""
    size = x.shape[p] if p is not None else y.shape[q or 0]
    x, y = (batched_sparse(x, p, size).coalesce(), batched_sparse(y, q, size).coalesce())
    high, wide = x.shape[1], y.shape[2]
    out = torch.sparse.mm(_diagonal(x), _diagonal(y)).coalesce()
    i, j = out.indices()
    positions = torch.stack([i // max(high, 1), i % max(high, 1), j % max(wide, 1)])
    return torch.sparse_coo_tensor(
        positions, out.values(), (size, high, wide), is_coalesced=True, check_invariants=False
    ), 0


def _diagonal(x: Tensor) -> Tensor:
    """Return one block-diagonal matrix of a batch of matrices."""
    (size, high, wide), (example, i, j) = x.shape, x.indices()
    return torch.sparse_coo_tensor(
        torch.stack([example * high + i, example * wide + j]), x.values(),
        (size * high, size * wide), is_coalesced=True, check_invariants=False,
    )  # fmt: skip


def sparse_product(x: Tensor, p: int | None, y: Tensor, q: int | None) -> Any:
    """Multiply sparse tensors after the product of dense tensors raised an error.

    Raises:
        RuntimeError: the current error is raised again if neither tensor is sparse.
    """
    if not is_sparse(x) and not is_sparse(y):
        raise
    return product_with_sparse(x, p, y, q)


def _transpose(x: Tensor, bdim: int | None) -> tuple[Tensor, int | None]:
    return (
        (x.transpose(0, 1), None) if bdim is None else (batch_to_front(x, bdim).transpose(1, 2), 0)
    )


def _times(
    x: Tensor, p: int | None, y: Tensor, q: int | None, times: Times = torch.matmul
) -> tuple[Tensor, int]:
    """Multiply a sparse matrix by a dense matrix or a vector."""
    vector = logical_rank(y, q) == 1
    if p is None:  # the examples become further columns
        assert q is not None
        columns = y.movedim(q, -1)
        out = times(x, columns if vector else columns.flatten(1))
        return (out, 1) if vector else (out.unflatten(1, columns.shape[1:]), 2)
    x = batch_to_front(x, p)
    if is_compressed(x):
        out = times(*as_one_matrix(x, y, q))
        return out.unflatten(0, (x.shape[0], x.shape[1])), 0
    y = y.expand(x.shape[0], *y.shape) if q is None else batch_to_front(y, q)
    if times is not torch.matmul and type(x) is Tensor:
        x = _with_stored_gradient(x)
    out = torch.bmm(x, y.unsqueeze(-1) if vector else y)
    return (out.squeeze(-1) if vector else out), 0


def _with_stored_gradient(x: Tensor) -> Tensor:
    """Return a sparse tensor whose gradient has stored elements only, as for ``torch.sparse.mm``.

    The gradient of ``bmm`` is dense.
    """
    x = x.coalesce()
    return torch.sparse_coo_tensor(
        x.indices(), x.values(), x.shape, is_coalesced=True, check_invariants=False
    )


def product_of_stacks(x: Tensor, p: int | None, y: Tensor, q: int | None) -> Any:
    """Return ``bmm`` of sparse and dense matrices: the stacks of all examples become one stack."""
    if p is None:  # the examples become further columns
        assert q is not None
        columns = y.movedim(q, -1)
        return torch.bmm(x, columns.flatten(2)).unflatten(2, columns.shape[2:]), 3
    if x.layout is not torch.sparse_coo or x.requires_grad:
        return NotImplemented
    x = batch_to_front(x, p).coalesce()
    (size, count), (example, k, i, j) = x.shape[:2], x.indices()
    stack = torch.sparse_coo_tensor(
        torch.stack([example * count + k, i, j]), x.values(), (size * count, *x.shape[2:]),
        is_coalesced=True, check_invariants=False,
    )  # fmt: skip
    out = torch.bmm(stack, expand_to_front(y, q, size).flatten(0, 1))
    return out.unflatten(0, (size, count)), 0


@row("aten::_sparse_mm")
def sparse_mm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """``torch.sparse.mm`` of a sparse and a dense matrix, in either order."""
    return product_with_sparse(args[0], bdims[0], args[1], bdims[1], op)


@row("aten::_sparse_addmm")
def sparse_addmm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return ``beta`` times a matrix plus ``alpha`` times a product."""
    if bdims[1] is None and bdims[2] is None:
        product_of: Any = torch.sparse.mm(args[1], args[2]), None
    else:
        product_of = product_with_sparse(args[1], bdims[1], args[2], bdims[2], torch.sparse.mm)
    if product_of is NotImplemented:
        return NotImplemented
    out, bdim = product_of
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    out = out if alpha == 1 else out * alpha
    if beta == 0:
        return out, bdim
    (added, out), bdim = align((args[0], out), (bdims[0], bdim))
    return added * beta + out, bdim


def sparse_sum_of_product(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """``addmm`` of sparse tensors, called after the rule of dense tensors raised an error."""
    if not is_sparse(args[1]) and not is_sparse(args[2]):
        raise
    return sparse_addmm(op, level, bdims, args, kwargs)


def linear(op: Any, bdims: BatchDims, args: Args) -> Any:
    """Multiply rows by a sparse weight matrix, and add the bias."""
    x, weight, *bias = args
    bdim, q, *r = bdims
    if q is None:
        rows_of_all = batch_to_front(x, bdim)
        out, bdim = op(rows_of_all.flatten(0, -2), weight).unflatten(0, rows_of_all.shape[:-1]), 0
    else:
        turned, p = (x, bdim) if logical_rank(x, bdim) == 1 else _transpose(x, bdim)
        multiplied = product_with_sparse(weight, q, turned, p)
        if multiplied is NotImplemented:
            return NotImplemented
        out, bdim = multiplied
        out = out if turned is x else out.transpose(1, 2)
    if bias and bias[0] is not None:
        (out, added), bdim = align((out, bias[0]), (bdim, r[0]))
        out = out + added
    return out, bdim


@row("aten::_sparse_mm.reduce")
def sparse_mm_reduce(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Each column is reduced separately, so the examples become further columns."""
    x, p = args[0], bdims[0]
    if p is not None:
        out = op(*as_one_matrix(x, args[1], bdims[1]), *args[2:], **kwargs)
        return out.unflatten(0, (x.shape[0], x.shape[1])), 0
    columns = args[1].movedim(bdims[1], -1)
    out = op(args[0], columns.flatten(1), *args[2:], **kwargs)
    return out.unflatten(1, columns.shape[1:]), 2


@row("aten::_sparse_mm_reduce_impl")
def sparse_mm_reduce_impl(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Return the product, and for its derivative the stored element that each result is from."""
    x = batch_of(args[0], bdims[0], level.batch_size)
    y = expand_to_front(args[1], bdims[1], level.batch_size).flatten(0, 1)
    diagonal_of_ones, shape = diagonal(x), x.shape[:2]
    out, chosen = op(diagonal_of_ones, y, *args[2:])
    if args[2] not in ("amax", "amin"):
        return (out.unflatten(0, shape), chosen), (0, None)
    chosen = _first_equal(diagonal_of_ones, y, out).unflatten(0, shape)
    return (out.unflatten(0, shape), _convert_indices(chosen, x.values().shape[1], -1)), 0


def _first_equal(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Return the index of the stored element that each result of a reduced product is from.

    torch returns it only while its own autograd records the call. An outer level can record
    instead.
    """
    compressed, columns, values = members(x)
    stored = len(values)
    lines = torch.arange(x.shape[0], device=x.device).repeat_interleave(
        compressed.diff(), output_size=stored
    )
    equal = values.unsqueeze(1) * y.index_select(0, columns) == out.index_select(0, lines)
    numbers = torch.arange(stored, device=x.device).unsqueeze(1).where(equal, stored)
    none = torch.full(out.shape, stored, device=x.device)
    return none.scatter_reduce(0, lines.unsqueeze(1).expand_as(numbers), numbers, "amin")


@row("aten::_sparse_mm_reduce_impl_backward")
def sparse_mm_reduce_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Use the block-diagonal matrix, as the product does."""
    size = level.batch_size
    x = batch_of(args[0], bdims[0], size)
    grad, weight, chosen = (
        expand_to_front(arg, bdim, size) if arg.numel() else arg
        for arg, bdim in zip(
            (args[1], args[2], args[4]), (bdims[1], bdims[2], bdims[4]), strict=True
        )
    )
    if chosen.numel():
        chosen = _convert_indices(chosen, x.values().shape[1], 1).flatten(0, 1)
    gradients = op(
        diagonal(x), grad.flatten(0, 1), weight.flatten(0, 1), args[3], chosen, *args[5:]
    )
    of_x, of_y = gradients
    return (
        None if of_x is None else with_values(x, of_x.values().unflatten(0, (size, -1))),
        None if of_y is None else of_y.unflatten(0, (size, -1)),
    ), 0


def _convert_indices(chosen: Tensor, stored: int, sign: int) -> Tensor:
    """Convert indices of stored elements: from all examples to each (``sign`` -1), or back (1).

    The number of stored elements stands for a row that stores none.
    """
    size = len(chosen)
    before = torch.arange(size, device=chosen.device).view(-1, 1, 1) * stored * sign
    none, instead = (size * stored, stored) if sign < 0 else (stored, size * stored)
    return torch.where(chosen == none, instead, chosen + before)


@row("aten::_to_sparse.sparse_dim")
@refuse_like_torch
def to_sparse_dims(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim becomes an additional sparse dim."""
    return op(batch_to_front(args[0], bdims[0]), args[1] + 1), 0


@row("aten::_to_sparse", "aten::to_sparse")
def to_sparse(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Compressed layouts have batch dims too, and these also come first.

    The composite is batched whole: C++ reads the layout first, which a compressed tracer lacks.
    """
    return op(batch_to_front(args[0], bdims[0]), **kwargs), 0


@row(
    "aten::to_sparse_csr", "aten::to_sparse_csc", "aten::to_sparse_bsr", "aten::to_sparse_bsc",
    "aten::_to_sparse_csr", "aten::_to_sparse_csc", "aten::_to_sparse_bsr", "aten::_to_sparse_bsc",
)  # fmt: skip
def to_compressed(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """All examples must store the same number of elements."""
    x = batch_to_front(args[0], bdims[0])
    if x.layout is torch.sparse_coo:
        x, args = _rows_compressed(op, level, x), [args[0], *args[1:]]
    elif x.layout is torch.strided and x.dim() == 3 and level.batch_size > 1:
        blocks = args[1] if "sparse_bs" in op_name(op) else (1, 1)
        is_nonzero = (x != 0).unflatten(2, (-1, blocks[1])).unflatten(1, (-1, blocks[0]))
        _same_number(op, level, is_nonzero.any(4).any(2).flatten(1).sum(1), "to_sparse")
    return op(x, *args[1:], **kwargs), 0


def _rows_compressed(op: Any, level: RuleLevel, x: Tensor) -> Tensor:
    """Convert a batch of COO matrices to a batch of CSR matrices."""
    positions, stored = _stored_entries(op, level, x.coalesce())
    begins = torch.arange(x.shape[1] + 1, device=x.device).expand(level.batch_size, -1)
    compressed = torch.searchsorted(positions[..., 0].contiguous(), begins.contiguous())
    return of_members(
        compressed, positions[..., 1].contiguous(), stored.contiguous(), x.shape, torch.sparse_csr
    )


def _same_number(op: Any, level: RuleLevel, counts: Tensor, instead: str) -> None:
    """Require that the examples store the same number of elements, or split the batch."""
    if bool((counts != counts[:1]).any()):
        if level.splitter is None:
            refuse_dynamic_size(
                op, f"Use {instead}() instead, or examples that store as many elements"
            )
        check_equal_rows(op, level, counts)


@row("aten::_sparse_sum.dim")
def sparse_sum(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A result without sparse dims is dense, and then the batch of results is dense too."""
    x = batch_to_front(args[0], bdims[0])
    rank = x.dim() - 1
    out = op(x, [wrap_dim(dim, rank) + 1 for dim in args[1]], **kwargs)
    left = set(range(x.sparse_dim() - 1)) - {wrap_dim(dim, rank) for dim in args[1]}
    return (out if left or not is_sparse(out) else out.to_dense()), 0


@row("aten::_sparse_sum_backward")
def sparse_sum_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The batch dim is a sparse dim that is not reduced, so the gradient is sparse too."""
    size = level.batch_size
    x = batched_sparse(args[1], bdims[1], size)
    grad = args[0]
    if is_sparse(grad):
        grad = batched_sparse(grad, bdims[0], size)
    else:
        grad = expand_to_front(grad, bdims[0], size).to_sparse(1)
    return op(grad, x, [wrap_dim(dim, x.dim() - 1) + 1 for dim in args[2]]), 0


@row("aten::_sparse_softmax_backward_data", "aten::_sparse_log_softmax_backward_data")
def sparse_softmax_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Shift the dim past the batch dim, as the softmax does."""
    grad, out, dim, x = args
    size = level.batch_size
    grad, out, x = (
        batched_sparse(value, bdim, size)
        for value, bdim in ((grad, bdims[0]), (out, bdims[1]), (x, bdims[3]))
    )
    return op(grad, out, wrap_dim(dim, x.dim() - 1) + 1, x), 0


@row("aten::_sparse_softmax", "aten::_sparse_log_softmax")
def sparse_softmax(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Normalize over the stored elements of a dim."""
    x = batch_to_front(args[0], bdims[0])
    return op(x, wrap_dim(args[1], x.dim() - 1) + 1, *args[2:], **kwargs), 0


@row("aten::_sparse_sum", "aten::_sparse_sum.dtype")
def sparse_sum_of_all(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Return one dense number for each example."""
    x = batch_to_front(args[0], bdims[0])
    rest = list(range(1, x.dim()))
    return torch.sparse.sum(x, rest, **kwargs).to_dense() if rest else x.to_dense(), 0


@row("aten::_nnz")
def stored_count(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the largest number of elements that an example stores.

    Only C++ code calls this rule, to check for zero elements. The count that the user sees is
    computed in ``bridge/tracers/compressed_tracers.py``.
    """
    x = args[0]
    if is_compressed(x):
        return x.values().shape[1], None
    if not torch.ops.aten._nnz.default(x):
        return 0, None
    return int(
        torch.ops.aten._indices.default(batch_to_front(x, bdims[0]))[0].bincount().max()
    ), None


@row("aten::_sparse_mask_projection")
def sparse_mask_projection(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The transpose of ``sparse_mask``, for two sparse tensors."""
    x, mask = (
        batched_sparse(arg, bdim, level.batch_size)
        for arg, bdim in zip(args, bdims[:2], strict=False)
    )
    return op(x, mask, *args[2:]), 0


@row("aten::indices", "aten::_indices")
def indices(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the indices within each example."""
    return _stored_entries(op, level, batch_to_front(args[0], bdims[0]))[0].movedim(2, 1), 0


@row("aten::values", "aten::_values")
def values(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the stored elements of each example."""
    if is_compressed(args[0]):
        return op(args[0]), bdims[0]
    return _stored_entries(op, level, batch_to_front(args[0], bdims[0]))[1], 0


def _stored_entries(op: Any, level: RuleLevel, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices (example, element, dim) and values (example, element, ...) of a COO batch.

    All examples must store the same number of elements.
    """
    if x.layout is not torch.sparse_coo or x.sparse_dim() < 2:
        raise NotImplementedError(
            f"vmap: {function_name(op)} of a batch of tensors of layout {x.layout} with "
            f"{x.sparse_dim() - 1} sparse dims. Call to_dense() or to_sparse() first."
        )
    positions, stored = torch.ops.aten._indices.default(x), torch.ops.aten._values.default(x)
    if not x.is_coalesced():
        order = positions[0].argsort(stable=True)
        positions, stored = positions[:, order], stored[order]
    counts = positions[0].bincount(minlength=level.batch_size)
    _same_number(op, level, counts, "to_dense")
    shape = (level.batch_size, int(counts[0]) if level.batch_size else 0)
    return positions[1:].mT.unflatten(0, shape), stored.unflatten(0, shape)


@row("aten::_coalesce")
def coalesce(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The index of the example is part of each index, so examples are coalesced separately."""
    return args[0].coalesce(), bdims[0]


@row("aten::is_coalesced")
def is_coalesced(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The examples are coalesced if the batch is."""
    return op(args[0]), None


@row("aten::sparse_dim")
def sparse_dim(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim counts as one sparse dim, which is subtracted."""
    return op(args[0]) - is_sparse(args[0]), None


@row("aten::dense_dim")
def dense_dim(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """All dims of a strided tensor are dense, so there the batch dim is subtracted."""
    return op(args[0]) - (not is_sparse(args[0])), None


@row("aten::_sparse_coo_tensor_with_dims_and_tensors")
def sparse_coo_tensor(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The index of the example becomes an additional row of the indices."""
    sparse, dense, size, positions, stored = args
    count = level.batch_size
    positions, stored = (
        expand_to_front(positions, bdims[3], count),
        expand_to_front(stored, bdims[4], count),
    )
    examples = torch.arange(count, device=positions.device)[:, None].expand(
        count, positions.shape[2]
    )
    rows_of_all = torch.cat([examples[None], positions.movedim(1, 0)]).flatten(1)
    return op(sparse + 1, dense, [count, *size], rows_of_all, stored.flatten(0, 1), **kwargs), 0


@row("aten::sparse_mask")
def sparse_mask(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the values of a tensor at the indices that the mask stores."""
    x, mask = expand_to_front(args[0], bdims[0], level.batch_size), args[1]
    if is_compressed(mask):
        return op(x, batch_of(mask, bdims[1], level.batch_size)), 0
    return op(x, batched_sparse(mask, bdims[1], level.batch_size)), 0


@row("aten::_to_dense", "aten::to_dense")
def to_dense(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Every dim keeps its position."""
    return op(*args, **kwargs), bdims[0]
