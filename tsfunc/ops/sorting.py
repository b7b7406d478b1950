"""Sorting along a dim, and searching in sorted tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tsfunc.dispatch.messages import SPLIT
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import (
    align_batch_dim,
    batch_to_front,
    expand_to_front,
    flatten_examples,
    flatten_logical,
    logical_rank,
    physical_dim,
    unit_dims,
    wrap_dim,
)
from tsfunc.ops.keywords import keyword_bdim, takes_keywords
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row
from tsfunc.ops.shifts import Shift, shift_arguments
from tsfunc.ops.splitting import check_equal_rows
from tsfunc.user_code import user_location


def _line(x: Tensor, bdim: int, dim: int) -> tuple[Tensor, int, bool]:
    """Return the tensor, its physical dim, and True if it was a scalar and got a dim."""
    if x.dim() == 1:
        return x.unsqueeze(1), 1 + wrap_dim(dim, 0), True
    return x, physical_dim(dim, x.dim() - 1, bdim), False


def _without_dim(out: Any) -> Any:
    """Return results for a scalar, which got a dim after the batch dim."""
    return out.squeeze(1) if isinstance(out, Tensor) else tuple(o.squeeze(1) for o in out)


@row("aten::sort", "aten::argsort")
@shift_arguments(Shift.SAME, Shift.DIM)
def sort(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Sort along a logical dim."""
    x, *rest = args
    x, dim, is_scalar = _line(x, bdims[0], rest[0] if rest else -1)
    out = op(x, dim, *rest[1:], **kwargs)
    return (_without_dim(out) if is_scalar else out), bdims[0]


@row("aten::sort.stable", "aten::argsort.stable")
def sort_stable(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Sort each example along ``dim``, which is a keyword argument of these overloads."""
    x, dim, is_scalar = _line(args[0], bdims[0], kwargs.get("dim", -1))
    out = op(x, **{**kwargs, "dim": dim})
    return (_without_dim(out) if is_scalar else out), bdims[0]


@row("aten::topk")
@shift_arguments(Shift.SAME, Shift.SAME, Shift.DIM)
def topk(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A scalar is treated as one element; ``k`` can be 0 or 1."""
    x, k, *rest = args
    x, dim, is_scalar = _line(x, bdims[0], rest[0] if rest else -1)
    out = op(x, k, dim, *rest[1:], **kwargs)
    return (_without_dim(out) if is_scalar and k == 1 else tuple(out)), bdims[0]


def _search(
    sequence: Tensor, p: int | None, x: Tensor, q: int | None, size: int, kwargs: Mapping[str, Any],
    s: int | None = None,
) -> tuple[Tensor, int | None]:  # fmt: skip
    """Call searchsorted with one sequence for all values, or one for each row of values."""
    sorter = kwargs.get("sorter")
    rank = logical_rank(sequence, p)
    if p is None and s is None and rank == 1:
        # torch warns if the values are not contiguous, because it copies them.
        return torch.searchsorted(sequence, x.contiguous(), **kwargs), q
    sequence, x = expand_to_front(sequence, p, size), expand_to_front(x, q, size)
    if sorter is not None:
        kwargs = {**kwargs, "sorter": expand_to_front(sorter, s, size).contiguous()}
    shape = x.shape
    if rank == 1:
        x = flatten_logical(x)
    out = torch.searchsorted(sequence.contiguous(), x.contiguous(), **kwargs)
    return (out.view(shape) if rank == 1 else out), 0


@row("aten::searchsorted.Tensor")
def searchsorted(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Sequences with several dims match the rows of values with the same leading dims."""
    s = keyword_bdim(bdims, args, "sorter")
    return _search(args[0], bdims[0], args[1], bdims[1], level.batch_size, kwargs, s)


takes_keywords(["aten::searchsorted.Tensor", "aten::searchsorted.Scalar"], "sorter")


@row("aten::searchsorted.Scalar")
def searchsorted_number(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Search one number in the sequence of each example."""
    x = torch.as_tensor(args[1], device=args[0].device)
    x = x.to(torch.get_default_dtype()) if isinstance(args[1], float) else x
    s = keyword_bdim(bdims, args, "sorter")
    return _search(args[0], bdims[0], x, None, level.batch_size, kwargs, s)


@row("aten::bucketize.Tensor")
@refuse_like_torch
def bucketize(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call searchsorted with the arguments in reverse order."""
    if bdims[1] is None:
        return op(args[0].contiguous(), args[1], **kwargs), bdims[0]
    return _search(args[1], bdims[1], args[0], bdims[0], level.batch_size, kwargs)


@row("aten::bucketize.Scalar")
@refuse_like_torch
def bucketize_number(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Search one number in the boundaries of each example."""
    return searchsorted_number(op, level, (bdims[1], None), (args[1], args[0]), kwargs)


@row("aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar", "aten::isin.Scalar_Tensor")
@refuse_like_torch
def isin(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Look up all elements in shared values at once, or compare each with its example's values."""
    elements, values = args
    if bdims[1] is None:
        # Elements that are unique in each example can occur in several examples.
        return op(elements, values, **{**kwargs, "assume_unique": False}), bdims[0]
    values = flatten_examples(values, bdims[1])
    if isinstance(elements, Tensor):
        rank = logical_rank(elements, bdims[0])
        elements = align_batch_dim(elements, bdims[0], rank).unsqueeze(-1)
        values = unit_dims(values, 1, rank)
    is_member = (elements == values).any(-1)
    return is_member.logical_not() if kwargs.get("invert") else is_member, 0


@row("aten::one_hot")
def one_hot(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Compare the indices with each class.

    Raises:
        DataDependentError: ``num_classes`` is missing, and the vmap does not split batches.
    """
    count = args[1] if len(args) > 1 else -1
    x = batch_to_front(args[0], bdims[0])
    if count == -1:
        if level.splitter is None:
            raise DataDependentError(
                f"vmap: one_hot, at {user_location()}: without num_classes the size of the "
                f"result depends on the values of a batched tensor. Give one_hot num_classes. "
                f"(torch.func says: vmap: It looks like you're calling .item() on a Tensor.) "
                f"{SPLIT}."
            )
        most = flatten_logical(x).amax(1)
        check_equal_rows(op, level, most)
        count = int(most[0]) + 1
    if (type(count) is int and count < 1) or x.dtype is not torch.int64:
        return raise_as_one_example(op, bdims, args, kwargs)
    require(
        x == x.clamp(0, count - 1),
        f"Class values must be non-negative and smaller than num_classes ({count}).",
    )
    return (x.unsqueeze(-1) == torch.arange(count, device=x.device)).to(torch.int64), 0
