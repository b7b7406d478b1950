"""Products of vectors and matrices: the batch dim is kept, or folded into rows or columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops import sparse
from tsfunc.ops.dims import (
    align,
    align_batch_dim,
    batch_to_front,
    expand_to_front,
    logical_rank,
    refuse_inplace,
    unit_dims,
)
from tsfunc.ops.refusal import raise_as_one_example, ranks_are, refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows
from tsfunc.ops.sparse_elementwise import is_sparse


def _batch_first_of_rank(x: Tensor, bdim: int, rank: int, to: int) -> Tensor:
    """Move the batch dim first and insert dims of size 1 until ``to`` logical dims follow it."""
    return unit_dims(batch_to_front(x, bdim), 1, to - rank)


def _times_vector(x: Tensor, p: int | None, y: Tensor, q: int | None) -> tuple[Tensor, int]:
    """Return ``x @ y`` for ``y`` with one logical dim."""
    if q is None:
        assert p is not None
        return (x.matmul(y), p) if p < x.dim() - 1 else (x.movedim(p, 0).matmul(y), 0)
    if p is None:
        if q == 0 and x.dim() == 2:
            return y.matmul(x.mT), 0  # the vectors of all examples are the rows of one matrix
        # The vectors of all examples are the columns of one matrix.
        out = x.matmul(y if q == 1 else y.mT)
        return out, out.dim() - 1
    x, y = batch_to_front(x, p), batch_to_front(y, q)
    if x.dim() == 2:
        return x.unsqueeze(1).bmm(y.unsqueeze(2)).squeeze(2).squeeze(1), 0
    return x.matmul(unit_dims(y, 1, x.dim() - 3).unsqueeze(-1)).squeeze(-1), 0


def _vector_times(x: Tensor, p: int | None, y: Tensor, q: int | None) -> tuple[Tensor, int]:
    """Return ``x @ y`` for ``x`` with one logical dim and ``y`` with at least two."""
    if q is None:
        out = (x.mT if p else x).matmul(y)
        return out, out.dim() - 2
    y = batch_to_front(y, q)
    if p is None:
        return x.matmul(y), 0
    x = unit_dims(batch_to_front(x, p), 1, y.dim() - 2)
    return x.matmul(y).squeeze(-2), 0


def logical_matmul(x: Tensor, p: int | None, y: Tensor, q: int | None) -> tuple[Tensor, int]:
    """Return ``matmul`` of logical tensors, at least one of them batched."""
    rank = logical_rank(x, p)
    other = logical_rank(y, q)
    if other == 1:
        return _times_vector(x, p, y, q)
    if rank == 1:
        return _vector_times(x, p, y, q)
    if p is not None and q is not None:
        if rank != other:
            top = max(rank, other)
            return _batch_first_of_rank(x, p, rank, top).matmul(
                _batch_first_of_rank(y, q, other, top)
            ), 0
        if rank == 2:
            return _product(batch_to_front(x, p), batch_to_front(y, q)), 0
        return batch_to_front(x, p).matmul(batch_to_front(y, q)), 0
    if p is not None:
        if other == 2:
            return (x.matmul(y), p) if p < rank else (x.movedim(p, 0).matmul(y), 0)
        # Fold the batch into the rows: matmul would copy y for every example.
        size = x.shape[p]
        out = x.movedim(p, -3).flatten(-3, -2).matmul(y)
        return out.unflatten(-2, (size, out.shape[-2] // size)), out.dim() - 2
    assert q is not None
    if rank == 2 and (q == 0 or other > 2):
        return x.matmul(batch_to_front(y, q)), 0
    size, columns = y.shape[q], y.shape[-2 if q == other else -1]
    out = x.matmul(y.movedim(q, -2).flatten(-2))
    return out.unflatten(-1, (size, columns)), out.dim() - 1


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``bmm``. The product of columns and rows is a broadcast, in a third of the time.

    A product of columns and rows is the gradient of a layer's weights for one example.
    """
    columns, rows = x.shape[2], y.shape[1]
    if type(columns) is int and columns == 1 and rows == 1 and x.dtype is not torch.bool:
        return x * y
    return x.bmm(y)


def _check_dtypes(op: Any, bdims: BatchDims, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's error if the factors differ in dtype: a product without elements accepts it."""
    if args[0].dtype is not args[1].dtype:
        raise_as_one_example(op, bdims, args, kwargs)


def product_of_ranks(first: int, second: int) -> Rule:
    """Return the rule of a product of tensors of exactly these ranks, by ``matmul``."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, y = args
        p, q = bdims
        if logical_rank(x, p) != first or logical_rank(y, q) != second:
            return raise_as_one_example(op, bdims, args, kwargs)
        _check_dtypes(op, bdims, args, kwargs)
        return _dense_or_sparse_product(x, p, y, q)

    return rule


def _dense_or_sparse_product(
    x: Tensor, p: int | None, y: Tensor, q: int | None
) -> tuple[Tensor, int | None]:
    """Multiply by ``matmul``, or by a sparse product if that refuses the layouts."""
    try:
        return logical_matmul(x, p, y, q)
    except RuntimeError:
        return sparse.sparse_product(x, p, y, q)


rows(product_of_ranks(2, 2), "aten::mm")
rows(product_of_ranks(2, 1), "aten::mv")
rows(product_of_ranks(1, 1), "aten::dot")


def _have_ranks(bdims: BatchDims, args: Sequence[Any], first: int, second: int) -> bool:
    """True if two tensors have these ranks and stacks have equal sizes; ``matmul`` broadcasts."""
    if not ranks_are(bdims, args, first, second):
        return False
    if first < 3:
        return True
    sizes = [x.shape[1 if bdim == 0 else 0] for x, bdim in zip(args, bdims, strict=True)]
    return bool(sizes[0] == sizes[1])


@row("aten::bmm")
def bmm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Multiply the matrices of two stacks."""
    if not _have_ranks(bdims, args, 3, 3):
        return raise_as_one_example(op, bdims, args, kwargs)
    if is_sparse(args[0]):
        return sparse.product_of_stacks(args[0], bdims[0], args[1], bdims[1])
    return logical_matmul(args[0], bdims[0], args[1], bdims[1])


@row("aten::matmul", "aten::linalg_matmul")
def matmul(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Choose the product by the logical ranks of the arguments."""
    x, y = args
    p, q = bdims
    if x.dim() == (p is not None) or y.dim() == (q is not None):
        return raise_as_one_example(op, bdims, args, kwargs)
    _check_dtypes(op, bdims, args, kwargs)
    return _dense_or_sparse_product(x, p, y, q)


@row("aten::vdot")
def vdot(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Conjugate the first vector and call dot."""
    if not _have_ranks(bdims, args, 1, 1):
        return raise_as_one_example(op, bdims, args, kwargs)
    _check_dtypes(op, bdims, args, kwargs)
    return logical_matmul(args[0].conj(), bdims[0], args[1], bdims[1])


@row("aten::linear")
def linear(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call the operator once if only the input is batched.

    Batched weights need a batched product.
    """
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else None
    bdim, q = bdims[0], bdims[1]
    r = bdims[2] if len(bdims) > 2 else None
    _check_dtypes(op, bdims, args, kwargs)
    if bias is not None and bias.dtype is not weight.dtype:  # a separate sum would promote it
        raise_as_one_example(op, bdims, args, kwargs)
    exact = bias is None or (bias.dim() == 1 and weight.dim() == 2)
    if q is None and r is None and x.dim() > 1 and exact:
        try:
            if bdim < x.dim() - 1:
                return op(x, weight, bias), bdim
            return op(x.movedim(bdim, 0), weight, bias), 0
        except RuntimeError:
            if weight.layout is torch.strided:
                raise
    if weight.layout is not torch.strided:
        return sparse.linear(op, bdims, args)
    rank = logical_rank(weight, q)
    vector = bias is not None and logical_rank(bias, r) == 1
    if logical_rank(x, bdim) == 0 or rank > 2 or (bias is not None and (rank != 2 or not vector)):
        return raise_as_one_example(op, bdims, args, kwargs)
    if q is None:
        out, bdim = (
            (op(x, weight), None) if bdim is None else linear(op, level, (bdim, q), args[:2], {})
        )
    elif rank == 1:
        out, bdim = logical_matmul(x, bdim, weight, q)
    else:
        weight = batch_to_front(weight, q)
        if logical_rank(x, bdim) > 1:
            return _linear_weights(level.batch_size, x, bdim, weight, bias, r)
        out = (
            weight.matmul(x)
            if bdim is None
            else weight.bmm(batch_to_front(x, bdim).unsqueeze(2)).squeeze(2)
        )
        bdim = 0
    if bias is None:
        return out, bdim
    total = _scaled_sum(bias, r, out, bdim)
    return raise_as_one_example(op, bdims, args, kwargs) if total is None else total


def _linear_weights(
    size: int, x: Tensor, bdim: int | None, weight: Tensor, bias: Tensor | None, r: int | None
) -> tuple[Tensor, int]:
    """Apply linear to rows with one weight matrix per example, batch dim first."""
    rank = logical_rank(x, bdim)
    shape = (x if bdim is None else batch_to_front(x, bdim)[0]).shape[:-1] if rank > 2 else None
    rowwise = expand_to_front(x, bdim, size)
    if shape is not None:
        rowwise = rowwise.flatten(1, -2)
    if bias is None:
        out = rowwise.bmm(weight.mT)
    else:
        bias = bias if r is None else batch_to_front(bias, r).unsqueeze(1)
        out = torch.baddbmm(bias, rowwise, weight.mT)
    return (out if shape is None else out.unflatten(1, shape)), 0


def _is_zero(number: Any) -> bool:
    return isinstance(number, (int, float, complex)) and number == 0


def _is_one(number: Any) -> bool:
    return isinstance(number, (int, float, complex)) and number == 1


def _as_element(number: Any, dtype: torch.dtype) -> Any:
    """Return a factor as the kernels use it: truncated for integer dtypes."""
    if dtype.is_floating_point or dtype.is_complex:
        return number
    return bool(number) if dtype is torch.bool else int(number)


def _add_scaled(
    op: Any, bdims: BatchDims, args: Args, kwargs: Kwargs, out: Tensor, p: int | None
) -> Any:
    """Return ``beta * x + alpha * out``; ``x``, the first argument, must fit into ``out``."""
    x, bdim = args[0], bdims[0]
    beta, alpha = (_as_element(kwargs.get(name, 1), x.dtype) for name in ("beta", "alpha"))
    if _is_zero(beta):  # x can have any values then, including NaN; only its batch dim matters
        if bdim is None:
            assert p is not None
            return (out if _is_one(alpha) else out * alpha), p
        x = torch.zeros_like(x)
    total = _scaled_sum(x if _is_one(beta) else x * beta, bdim, out, p, alpha)
    return raise_as_one_example(op, bdims, args, kwargs) if total is None else total


def _scaled_sum(
    x: Tensor, bdim: int | None, out: Tensor, p: int | None, alpha: Any = 1
) -> tuple[Tensor, int] | None:
    """Return ``x + alpha * out`` in the shape of ``out``, or None.

    The result is None if ``x`` does not broadcast to ``out``.
    """
    shape = _logical_shape(out, p)
    (x, out), bdim = align((x, out), (bdim, p))
    total = torch.add(x, out, alpha=alpha)
    return (total, bdim) if _logical_shape(total, bdim) == shape else None


def _logical_shape(x: Tensor, bdim: int | None) -> list[int]:
    shape = list(x.shape)
    if bdim is not None:
        del shape[bdim]
    return shape


def _pair(bdims: BatchDims, args: Sequence[Any]) -> tuple[Tensor, int | None]:
    """Return the product of the second and the third argument."""
    if bdims[1] is None and bdims[2] is None:
        return args[1].matmul(args[2]), None
    return logical_matmul(args[1], bdims[1], args[2], bdims[2])


@row("aten::addmm")
@refuse_like_torch
def addmm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Use one kernel for unbatched weights (fold the rows), and for two batched factors."""
    x, a, b = args
    bdim, p, q = bdims
    if not _have_ranks(bdims[1:], args[1:], 2, 2) or logical_rank(x, bdim) > 2:
        return raise_as_one_example(op, bdims, args, kwargs)
    try:
        if q is None and p is not None and bdim is None and x.dim() < 2 and p < 2:
            out = op(x, a.flatten(0, 1), b, **kwargs)
            return out.unflatten(0, a.shape[:2]), p
        if p is not None and q is not None:
            if bdim is not None:
                x = unit_dims(batch_to_front(x, bdim), 1, 3 - x.dim())
            return torch.baddbmm(x, batch_to_front(a, p), batch_to_front(b, q), **kwargs), 0
        return _add_scaled(op, bdims, args, kwargs, *_pair(bdims, args))
    except RuntimeError:
        return sparse.sparse_sum_of_product(op, level, bdims, args, kwargs)


def added_product(first: int, second: int) -> Rule:
    """Return the rule of a sum with a product of tensors of exactly these ranks."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        if not _have_ranks(bdims[1:], args[1:], first, second):
            return raise_as_one_example(op, bdims, args, kwargs)
        return _add_scaled(op, bdims, args, kwargs, *_pair(bdims, args))

    return rule


rows(refuse_like_torch(added_product(2, 1)), "aten::addmv")
rows(refuse_like_torch(added_product(3, 3)), "aten::baddbmm")


def _sum_pair(bdims: BatchDims, args: Sequence[Any]) -> tuple[Tensor, int | None]:
    """Return the sum over the first dim of a batched product, as one product of long rows."""
    _, a, b = args
    _, p, q = bdims
    if p is None and q is None:
        return a.movedim(0, 1).flatten(1).matmul(b.flatten(0, 1)), None
    bdim = None if p is None else 0
    a = a.movedim(0, 1).flatten(1) if p is None else batch_to_front(a, p).movedim(1, 2).flatten(2)
    b = b.flatten(0, 1) if q is None else batch_to_front(b, q).flatten(1, 2)
    return logical_matmul(a, bdim, b, None if q is None else 0)


@row("aten::addbmm")
@refuse_like_torch
def addbmm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The sum of products is one product of longer rows."""
    if not _have_ranks(bdims[1:], args[1:], 3, 3):
        return raise_as_one_example(op, bdims, args, kwargs)
    return _add_scaled(op, bdims, args, kwargs, *_sum_pair(bdims, args))


def _outer(x: Tensor, p: int | None, y: Tensor, q: int | None) -> tuple[Tensor, int | None]:
    """Return the product of a column and a row."""
    column = batch_to_front(x, p).unsqueeze(-1)
    line = y if q is None else batch_to_front(y, q).unsqueeze(1)
    return column * line, None if p is None and q is None else 0


@row("aten::ger", "aten::outer")
def outer(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the outer product as a pointwise product."""
    if not _have_ranks(bdims, args, 1, 1):
        return raise_as_one_example(op, bdims, args, kwargs)
    return _outer(args[0], bdims[0], args[1], bdims[1])


@row("aten::addr")
@refuse_like_torch
def addr(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the sum of the first argument and an outer product."""
    if not _have_ranks(bdims[1:], args[1:], 1, 1):
        return raise_as_one_example(op, bdims, args, kwargs)
    return _add_scaled(op, bdims, args, kwargs, *_outer(args[1], bdims[1], args[2], bdims[2]))


_RANKS = {
    "aten::addmm_": (2, 2),
    "aten::addmv_": (2, 1),
    "aten::addr_": (1, 1),
    "aten::addbmm_": (3, 3),
    "aten::baddbmm_": (3, 3),
}


@row(
    "aten::addmm_", "aten::addmv_", "aten::baddbmm_", "aten::addbmm_", "aten::addr_",
)  # fmt: skip
def added_product_inplace(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Add the product to the first argument in place."""
    x, bdim = args[0], bdims[0]
    if bdim is None:
        refuse_inplace(op)
    name = op.name()
    if not _have_ranks(bdims[1:], args[1:], *_RANKS[name]):
        return raise_as_one_example(op, bdims, args, kwargs)
    if name == "aten::addbmm_":
        out, p = _sum_pair(bdims, args)
    elif name == "aten::addr_":
        out, p = _outer(args[1], bdims[1], args[2], bdims[2])
    else:
        out, p = _pair(bdims, args)
    if out.numel() * (1 if p is not None else x.shape[bdim]) != x.numel():
        return raise_as_one_example(op, bdims, args, kwargs)
    beta, alpha = (_as_element(kwargs.get(name, 1), x.dtype) for name in ("beta", "alpha"))
    if _is_zero(beta):
        x.zero_()
    elif not _is_one(beta):
        x.mul_(beta)
    x.add_(align_batch_dim(out, p, x.dim() - 1 - bdim), alpha=alpha)
    return x, bdim


@row("aten::_trilinear")
def trilinear(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Shift all named dims past the batch dim, which is first."""
    tensors = [
        expand_to_front(x, bdim, level.batch_size) for x, bdim in zip(args, bdims[:3], strict=False)
    ]
    moved = [[d + 1 for d in dim] for dim in args[3:7]]
    unroll = (args[7] if len(args) > 7 else 1) + 1
    return op(*tensors, *moved, unroll, **kwargs), 0
