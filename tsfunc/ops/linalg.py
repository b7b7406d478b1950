"""Linear algebra: kernels accept any number of leading dims, the first of which is the batch dim.

NOTE [batched solves]
A matrix that is the same for all examples is factored once: the right-hand sides of all examples
become columns of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    NoExamples,
    aligned_batches,
    batch_to_front,
    broadcast_to_front,
    expand_to_front,
    logical_rank,
    with_defaults,
)
from tsfunc.ops.keywords import keyword_bdim, takes_keywords
from tsfunc.ops.reductions import reduction
from tsfunc.ops.refusal import raise_as_one_example, ranks_at_least, refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row, rows


def result_dims(out: Any, size: Any) -> Any:
    """Return the batch dims of results: None for empty vectors (not requested), else 0."""
    if isinstance(out, Tensor):
        return None if out.dim() == 1 and out.shape[0] == 0 != size else 0
    return tuple(result_dims(o, size) for o in out)


def leading(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Batching rule of a function of one matrix."""
    if args[0].dim() < 3:
        return raise_as_one_example(op, bdims, args, kwargs)
    out = op(batch_to_front(args[0], bdims[0]), *args[1:], **kwargs)
    return out, result_dims(out, level.batch_size)


rows(
    leading,
    *(
        f"aten::{name}"
        for name in (
            "linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse linalg_qr linalg_eig "
            "_linalg_eigvals _linalg_eigh _linalg_svd linalg_lu linalg_lu_factor_ex "
            "linalg_ldl_factor_ex geqrf linalg_inv inverse linalg_cholesky linalg_eigh "
            "linalg_eigvalsh linalg_eigvals linalg_svd linalg_svdvals linalg_pinv "
            "linalg_matrix_power matrix_power linalg_matrix_sqrth linalg_polar"
        ).split()
    ),
)  # fmt: skip


@row(
    "aten::_linalg_det",
    "aten::_linalg_slogdet",
    "aten::linalg_det",
    "aten::linalg_slogdet",
    "aten::det",
    "aten::slogdet",
    "aten::logdet",
)
def determinant(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """torch factors contiguous matrices transposed, and its derivative checks the same.

    The batch is made contiguous if the examples are, so that both checks agree.
    """
    if args[0].dim() < 3:
        return raise_as_one_example(op, bdims, args, kwargs)
    x = batch_to_front(args[0], bdims[0])
    if x.shape[0] and x[0].is_contiguous():
        x = x.contiguous()
    return op(x), 0


_RANK = torch.ops.aten.linalg_matrix_rank.atol_rtol_tensor
_TOLERANCES = ("aten::linalg_pinv.atol_rtol_tensor", "aten::linalg_matrix_rank.atol_rtol_tensor")


@row(*_TOLERANCES)
def with_tolerances(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A function of a matrix and of tolerances that broadcast with its leading dims."""
    if not ranks_at_least(bdims, args, 2):
        return raise_as_one_example(op, bdims, args, kwargs)
    names = [name for name in ("atol", "rtol") if kwargs.get(name) is not None]
    x, *tolerances = aligned_batches(
        [args[0], *(kwargs[name] for name in names)],
        [bdims[0], *(keyword_bdim(bdims, args, name) for name in names)],
        [2] + [0] * len(names),
    )
    kwargs = {**kwargs, **dict(zip(names, tolerances, strict=True))}
    if op is _RANK and x.shape[0] < level.batch_size and x.numel():
        return _ranks(x, **kwargs), 0
    out = op(x, **kwargs)
    # For matrices without elements torch ignores the tolerances, and the result lacks their batch
    # dim.
    return (out, 0) if out.shape[0] == level.batch_size else (out.squeeze(0), None)


def _ranks(
    x: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """Return the ranks of one matrix for several tolerances.

    torch's function warns about several tolerances.
    """
    values = torch.linalg.eigvalsh(x).abs() if hermitian else torch.linalg.svdvals(x)
    if rtol is None:
        assert atol is not None
        rtol = torch.where(atol > 0, 0, torch.finfo(x.dtype).eps * max(x.shape[-2:]))
    limit = rtol * values.amax(-1)
    if atol is not None:
        limit = torch.maximum(atol, limit)
    return (values > limit.unsqueeze(-1)).sum(-1)


takes_keywords(_TOLERANCES, "atol", "rtol")


@row("aten::linalg_matrix_exp")
def matrix_exp(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Flatten the leading dims: the kernel accepts several only if a view flattens them."""
    x = batch_to_front(args[0], bdims[0])
    if x.dim() < 3:
        return raise_as_one_example(op, bdims, args, kwargs)
    return op(x.flatten(0, -3)).unflatten(0, x.shape[:-2]), 0


def matrices_rule(*ranks: int, broadcast: bool = False) -> Any:
    """Return the rule of a function of several matrices with the same leading dims.

    ``broadcast`` is True for an operator that broadcasts leading dims.
    """

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        count = len(ranks)
        if not ranks_at_least(bdims, args[:count], *ranks):
            return raise_as_one_example(op, bdims, args, kwargs)
        tensors = aligned_batches(args[:count], bdims[:count], ranks, level.batch_size)
        leads = {
            tuple(_shape(x, bdim)[:-r]) for x, bdim, r in zip(args, bdims, ranks, strict=False)
        }
        if len(leads) > 1 and not broadcast:
            return raise_as_one_example(op, bdims, args, kwargs)
        lead = torch.broadcast_shapes(
            *(x.shape[: x.dim() - r] for x, r in zip(tensors, ranks, strict=True))
        )
        tensors = [
            x.expand(*lead, *x.shape[x.dim() - r :]) for x, r in zip(tensors, ranks, strict=True)
        ]
        return op(*tensors, *args[count:], **kwargs), 0

    return rule


rows(matrices_rule(2, 1), "aten::linalg_householder_product")
rows(matrices_rule(2, 1, 2), "aten::ormqr")
rows(refuse_like_torch(matrices_rule(2, 1, 2, broadcast=True)), "aten::linalg_ldl_solve")


_unpacked = matrices_rule(2, 1)


@row("aten::lu_unpack")
def lu_unpack(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Results that were not requested are empty and have no batch dim."""
    unpacked = _unpacked(op, level, bdims, args, kwargs)
    if unpacked is NotImplemented:
        return unpacked
    outs, bdim = unpacked
    return outs, tuple(None if out.numel() == 0 and out.dim() == 1 else bdim for out in outs)


@row("aten::linalg_cross")
def linalg_cross(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """``dim`` is counted from the end, where a batch dim at the front does not change it."""
    x, y = args
    rank = logical_rank(x, bdims[0])
    dim = kwargs.get("dim", -1)
    if rank != logical_rank(y, bdims[1]) or not -rank <= dim < rank:
        return raise_as_one_example(op, bdims, args, kwargs)
    x, y = (broadcast_to_front(v, d) for v, d in ((x, bdims[0]), (y, bdims[1])))
    return op(x, y, dim=dim - rank if dim >= 0 else dim), 0


def _as_columns(
    solve: Callable[[Tensor], Any], rhs: Tensor, bdim: int, left: bool
) -> tuple[Any, Tensor, int]:
    """Solve with one matrix for the right-hand sides of all examples: NOTE [batched solves].

    Returns:
        The results of ``solve``, the solution, and the batch dim of the solution.
    """
    size = rhs.shape[bdim]
    dim = -2 if left else -3
    wide = rhs.movedim(bdim, dim).flatten(dim, dim + 1)
    outs = solve(wide)
    out = outs if isinstance(outs, Tensor) else outs[0]
    extent = out.shape[dim + 1]
    out = out.unflatten(dim + 1, (size, extent // size))
    return outs, out, out.dim() + dim


def _shape(x: Tensor, bdim: int | None) -> Any:
    return x.shape if bdim is None else batch_to_front(x, bdim).shape[1:]


@row("aten::_linalg_solve_ex", "aten::linalg_solve")
def solve(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A right-hand side with one dim less than the matrix is a vector, or a batch of vectors.

    ``_linalg_solve_ex`` returns factors besides the solution.
    """
    a, b = args
    if not ranks_at_least(bdims, args, 2, 1):
        return raise_as_one_example(op, bdims, args, kwargs)
    left = kwargs.get("left", True)
    rank, other = logical_rank(a, bdims[0]), logical_rank(b, bdims[1])
    vector = other == 1
    if rank - 1 == other and not vector:
        vector = _shape(a, bdims[0])[:-1] == _shape(b, bdims[1])
    if vector:
        if not left:
            return NotImplemented
        b = batch_to_front(b, bdims[1]).unsqueeze(-1)
    q = None if bdims[1] is None else 0 if vector else bdims[1]
    if bdims[0] is None:
        assert q is not None
        outs, out, bdim = _as_columns(lambda wide: op(a, wide, **kwargs), b, q, left)
        out = out.squeeze(-1) if vector else out
        return (
            (out, bdim)
            if isinstance(outs, Tensor)
            else ((out, *outs[1:]), (bdim, None, None, None))
        )
    a, b = aligned_batches((a, b), (bdims[0], q), (2, 2), level.batch_size)
    outs = op(a, b, **kwargs)
    if isinstance(outs, Tensor):
        return outs.squeeze(-1) if vector else outs, 0
    out, *rest = outs
    for _ in range(a.dim() - 1 - rank):  # the factors have the rank of the matrix
        rest = [r.squeeze(1) for r in rest]
    return (out.squeeze(-1) if vector else out, *rest), 0


@row("aten::linalg_solve_triangular")
def solve_triangular(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The matrix is the first argument."""
    if not ranks_at_least(bdims, args, 2, 2):
        return raise_as_one_example(op, bdims, args, kwargs)
    a, b = args
    if bdims[0] is None:
        left = kwargs.get("left", True)
        _, out, bdim = _as_columns(lambda wide: op(a, wide, **kwargs), b, bdims[1], left)
        return out, bdim
    return op(*aligned_batches(args, bdims, (2, 2), level.batch_size), **kwargs), 0


@row("aten::cholesky_solve", "aten::triangular_solve")
def solve_factored(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The matrix is the second argument. triangular_solve also returns a copy of the matrix."""
    if not ranks_at_least(bdims, args, 2, 2):
        return raise_as_one_example(op, bdims, args, kwargs)
    b, a, *rest = args
    if bdims[1] is None and logical_rank(b, bdims[0]) >= a.dim():
        outs, out, bdim = _as_columns(lambda wide: op(wide, a, *rest, **kwargs), b, bdims[0], True)
        return (out, bdim) if outs is None or isinstance(outs, Tensor) else (
            (out, outs[1]), (bdim, None)
        )  # fmt: skip
    return op(*aligned_batches((b, a), bdims[:2], (2, 2), level.batch_size), *rest, **kwargs), 0


@row("aten::linalg_lu_solve")
def lu_solve(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Factors and pivots have the same batch.

    The kernel broadcasts both with the right-hand side.
    """
    if not ranks_at_least(bdims, args, 2, 1, 2):
        return raise_as_one_example(op, bdims, args, kwargs)
    lu, pivots, b = args
    if _shape(lu, bdims[0])[:-1] != _shape(pivots, bdims[1]):
        return raise_as_one_example(op, bdims, args, kwargs)
    if bdims[0] is None and bdims[1] is None:
        left = kwargs.get("left", True)
        _, out, bdim = _as_columns(lambda wide: op(lu, pivots, wide, **kwargs), b, bdims[2], left)
        return out, bdim
    lu, pivots, b = aligned_batches(args, bdims, (2, 1, 2), level.batch_size)
    return op(lu, pivots, b, **kwargs), 0


@row("aten::linalg_lstsq")
def lstsq(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Results that the driver does not compute are empty."""
    if not level.batch_size:
        raise NoExamples
    a, b, *rest = args
    if not ranks_at_least(bdims, args, 2, 1):
        return raise_as_one_example(op, bdims, args, kwargs)
    rank, other = logical_rank(a, bdims[0]), logical_rank(b, bdims[1])
    vector = other == rank - 1
    a, b = (
        expand_to_front(a, bdims[0], level.batch_size),
        expand_to_front(b, bdims[1], level.batch_size),
    )
    if a.shape[1:-1] != b.shape[1 : a.dim() - 1]:
        return raise_as_one_example(op, bdims, args, kwargs)
    out, *others = op(a, b.unsqueeze(-1) if vector else b, *rest, **kwargs)
    results = (out.squeeze(-1) if vector else out, *others)
    return results, result_dims(results, level.batch_size)


@row("aten::_linalg_check_errors")
def check_errors(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Check the error codes of a batch of matrices."""
    return op(args[0].contiguous(), *args[1:], **{**kwargs, "is_matrix": False}), None


_over_dims = reduction(2, 3, None, (None,))


@row("aten::linalg_norm", "aten::linalg_norm.ord_str")
def norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Reduce vectors or matrices over ``dim``.

    Without ``dim``, reduce all elements, or (with ``ord``) the one or two dims of the input.
    """
    x, order, over, keep = with_defaults(args, None, None, None, False)
    rank = x.dim() - 1
    if x.layout is not torch.strided:
        return NotImplemented
    if over is None and order is None:
        vector_norm = torch.ops.aten.linalg_vector_norm.default
        return _over_dims(vector_norm, level, bdims, (x, 2, None, keep), kwargs)
    if over is None and not 1 <= rank <= 2:
        return raise_as_one_example(op, bdims, args, kwargs)
    return _over_dims(op, level, bdims, (x, order, over, keep), kwargs)


@row("aten::linalg_matrix_norm", "aten::linalg_matrix_norm.str_ord")
def matrix_norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Reduce the matrices in ``dim``, by default the last two dims."""
    x, order, over, keep = with_defaults(args, None, "fro", (-2, -1), False)
    if x.dim() < 3:
        return raise_as_one_example(op, bdims, args, kwargs)
    return _over_dims(op, level, bdims, (x, order, over, keep), kwargs)
