"""Reductions and scans: logical dims are shifted past the batch dim.

A tensor without logical dims accepts dims 0 and -1. The kernel gets such a tensor with a dim of
size 1, because its only physical dim is the batch dim.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.compressed import LAYOUTS
from tsfunc.ops.dims import (
    align,
    batch_to_front,
    check_dims_of_scalar,
    every_dim,
    expand_at,
    flatten_examples,
    physical_dim,
    promote_scalars,
    refuse_inplace,
    with_defaults,
    wrap_dim,
)
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows
from tsfunc.ops.shifts import Shift, shift_arguments


def reduction(
    position: int = 1,
    keep: int | None = 2,
    default: int | None = None,
    between: tuple[Any, ...] = (),
) -> Rule:
    """Return the rule of a reduction over ``args[position]``: an int, a list, or None (all dims).

    Args:
        keep: the index of keepdim; None if keepdim is keyword-only or missing.
        default: the dims if they are not given.
        between: the defaults of the arguments between the tensor and the dims.
    """

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, bdim = args[0], bdims[0]
        if len(args) < position:
            args = [x, *with_defaults(args[1:], *between)]
        dims = args[position] if len(args) > position else default
        keeps_dims = args[keep] if keep is not None and len(args) > keep else kwargs.get("keepdim")
        rank = x.dim() - 1
        if rank == 0:
            return _of_scalar(op, x, dims, args, kwargs, position, keep), 0
        if isinstance(dims, int):
            target: Any = physical_dim(dims, rank, bdim)
            before = 1 if target < bdim else 0
        else:
            if dims:
                target = [physical_dim(dim, rank, bdim) for dim in dims]
            else:
                target = every_dim(rank, bdim)
            before = sum([dim < bdim for dim in target])
        out = op(x, *args[1:position], target, *args[position + 1 :], **kwargs)
        return out, bdim if keeps_dims else bdim - before

    return shift_arguments(*[Shift.SAME] * position, Shift.DIMS)(rule)


def _of_scalar(
    op: Any, x: Tensor, dims: Any, args: Args, kwargs: Kwargs, position: int, keep: int | None
) -> Any:
    """Reduce a scalar over an added dim of size 1; keepdim has no effect."""
    single = isinstance(dims, int)
    check_dims_of_scalar([dims] if single else dims or ())
    rest = list(args[position + 1 :])
    if keep is not None and len(args) > keep:
        rest[keep - position - 1] = False
    if "keepdim" in kwargs:
        kwargs = {**kwargs, "keepdim": False}
    target = 1 if single else [1]
    return op(x.unsqueeze(1), *args[1:position], target, *rest, **kwargs)


def over_all_dims(reduce: Callable[..., Any]) -> Rule:
    """Return the rule of a reduction over all dims; ``reduce(x, dims)`` reduces some dims."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, bdim = args[0], bdims[0]
        if x.dim() == 1:
            x = x.unsqueeze(1)
        return reduce(x, every_dim(x.dim() - 1, bdim), **kwargs), 0

    return rule


def _sum_all(x: Tensor, dims: Sequence[int], **kwargs: Any) -> Any:
    """Sum all elements. The sum of a sparse tensor is dense."""
    if x.layout in LAYOUTS:
        return x.values().flatten(1).sum(1, **kwargs)
    out: Tensor = x.sum(tuple(dims), **kwargs)
    return out.to_dense() if out.is_sparse else out


_by_dims = reduction()
_keyword_keepdim = reduction(1, None)


@shift_arguments(Shift.SAME, Shift.DIMS)
def variance(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Reduce with correction -1 for an empty batch, or torch warns about degrees of freedom."""
    if type(level.batch_size) is int and level.batch_size == 0:
        kwargs = {**kwargs, "correction": -1}
    return _keyword_keepdim(op, level, bdims, args, kwargs)


@shift_arguments(Shift.SAME, Shift.DIMS)
def all_or_any(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """An empty list of dims reduces no dim; other reductions treat it as all dims."""
    if len(args) > 1 and args[1] is not None and len(args[1]) == 0:
        return op(*args, **kwargs), bdims[0]
    return _by_dims(op, level, bdims, args, kwargs)


@shift_arguments(Shift.SAME, Shift.DIMS)
def arg_extreme(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Without ``dim``, return the index into the flattened logical tensor."""
    if len(args) > 1 and args[1] is not None:
        return _by_dims(op, level, bdims, args, kwargs)
    x, bdim = args[0], bdims[0]
    out = op(flatten_examples(x, bdim), 1)
    if len(args) > 2 and args[2]:
        out = out.reshape(out.shape + (1,) * (x.dim() - 1))
    return out, 0


@row("aten::cov")
def covariance(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Covariance without weights; with weights torch reads their values to check them."""
    if kwargs.get("fweights") is not None or kwargs.get("aweights") is not None:
        return NotImplemented
    x = batch_to_front(args[0], bdims[0])
    if x.dim() > 3 or x.dtype is torch.bool:
        return raise_as_one_example(op, bdims, args, kwargs)
    if x.dim() < 3:
        x = x.reshape(level.batch_size, 1, -1 if x.dim() == 2 else 1)
    out = unweighted_covariance(x, kwargs.get("correction", 1))
    return (out.flatten(0) if x.shape[1] == 1 else out), 0


def unweighted_covariance(x: Tensor, correction: int) -> Tensor:
    """Return the covariances of the rows of matrices (..., variables, observations)."""
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    degrees = x.shape[-1] - correction
    if type(degrees) is int and degrees <= 0:
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number "
            "of observations.",
            stacklevel=2,
        )
    centred = x - x.mean(-1, keepdim=True)
    return centred @ centred.mT.conj() / torch.sym_max(degrees, 0)


@row("aten::aminmax")
def aminmax(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """``dim`` is keyword-only.

    Without it all dims are reduced, and keepdim keeps each of size 1.
    """
    x, bdim = args[0], bdims[0]
    dim, keepdim = kwargs.get("dim"), kwargs.get("keepdim", False)
    rank = x.dim() - 1
    if dim is None or rank == 0:
        wrap_dim(dim or 0, rank)
        low, high = op(flatten_examples(x, bdim), dim=1)
        shape = low.shape + ((1,) * rank if keepdim else ())
        return (low.reshape(shape), high.reshape(shape)), 0
    target = physical_dim(dim, rank, bdim)
    out = op(x, dim=target, keepdim=keepdim)
    return out, bdim if keepdim or target > bdim else bdim - 1


@row("aten::prod")
def prod(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Flatten the logical dims, because the kernel takes one dim."""
    return torch.prod(flatten_examples(args[0], bdims[0]), 1, **kwargs), 0


@row("aten::median")
def median(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Median of all elements: the logical dims are flattened into one."""
    x = flatten_examples(args[0], bdims[0])
    return _with_shared_gradient(x, torch.median(x, 1).values), 0


@row("aten::nanmedian")
def nanmedian(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Take the median of each example's elements, and ignore NaN."""
    x = flatten_examples(args[0], bdims[0])
    return _with_shared_gradient(x, torch.nanmedian(x, 1).values), 0


def _with_shared_gradient(x: Tensor, extreme: Tensor) -> Tensor:
    """Return elements found along dim 1, whose gradient is shared by all equal elements.

    torch shares the gradient for medians of all elements. Along a dim, the gradient goes to the
    found element only.
    """
    if not x.is_floating_point():
        return extreme
    extreme = extreme.unsqueeze(1)
    return torch.where((x == extreme) | extreme.isnan(), x, -math.inf).amax(1)


@row("aten::norm.Scalar", "aten::norm.ScalarOpt_dtype")
def norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Norm of all elements, by the overload that takes dims."""
    x, bdim = args[0], bdims[0]
    p = 2 if len(args) < 2 or args[1] is None else args[1]
    if x.dim() == 1:
        x = x.unsqueeze(1)
    over = every_dim(x.dim() - 1, bdim)
    if kwargs:
        return torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, over, False, **kwargs), 0
    return torch.ops.aten.norm.ScalarOpt_dim(x, p, over, False), 0


@row("aten::dist")
def dist(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the norm of the difference."""
    (x, y), bdim = align(promote_scalars(args[:2], bdims[:2]), bdims)
    difference = x - y
    return norm(op, level, [bdim], (difference, *args[2:]), {})


@row("aten::renorm")
def renorm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Scale each slice by a factor from its norm: the kernel has no second dim for the batch."""
    x, p, dim, limit = args
    bdim = bdims[0]
    if x.dim() < 3 or p <= 0 or limit < 0:
        return raise_as_one_example(op, bdims, args, kwargs)
    target = physical_dim(dim, x.dim() - 1, bdim)
    over = [d for d in range(x.dim()) if d != bdim and d != target]
    lengths = torch.linalg.vector_norm(x, p, over, True)
    return x * torch.where(lengths > limit, limit / (lengths + 1e-7), 1.0).to(x.dtype), bdim


@row("aten::renorm_")
def renorm_inplace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Bound the norms of the slices of each example, and copy the result into the argument."""
    if bdims[0] is None:
        refuse_inplace(op)
    x, *rest = args
    before = x.clone() if x.requires_grad else x  # the derivative needs this value
    out = renorm(torch.ops.aten.renorm.default, level, bdims, (before, *rest), kwargs)
    return out if out is NotImplemented else (x.copy_(out[0]), bdims[0])


def along_dim(tensors: int = 1) -> Rule:
    """Return the rule of an operator that works along the dim ``args[tensors]`` and keeps it.

    ``tensors`` is the number of tensor arguments, which come first.
    """

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, bdim = args[0], bdims[0]
        if tensors == 1:
            values = [x]
        else:
            bdim = next(bdim for bdim in bdims if bdim is not None)
            values = [
                arg if dim == bdim else expand_at(arg, dim, level.batch_size, bdim)
                for arg, dim in zip(args[:tensors], bdims, strict=False)
            ]
        rank = values[0].dim() - 1
        dim = args[tensors] if len(args) > tensors else -1
        rest = args[tensors + 1 :]
        if rank:
            return op(*values, physical_dim(dim, rank, bdim), *rest, **kwargs), bdim
        wrap_dim(dim, 0)
        out = op(*[v.unsqueeze(1) for v in values], 1, *rest, **kwargs)
        return (out.squeeze(1) if isinstance(out, Tensor) else [o.squeeze(1) for o in out]), 0

    return shift_arguments(*[Shift.SAME] * tensors, Shift.DIM)(rule)


_along = along_dim()


def along_inplace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """In-place operators with one tensor: the result is written into it."""
    _along(op, level, bdims, args, kwargs)
    return args[0], bdims[0]


rows(
    _by_dims,
    "aten::sum.dim_IntList",
    "aten::mean.dim",
    "aten::nansum",
    "aten::amax",
    "aten::amin",
    "aten::logsumexp",
    "aten::special_logsumexp",
    "aten::prod.dim_int",
    "aten::max.dim",
    "aten::min.dim",
    "aten::median.dim",
    "aten::nanmedian.dim",
    "aten::all.dim",
    "aten::any.dim",
    "aten::_aminmax.dim",
)
rows(all_or_any, "aten::all.dims", "aten::any.dims")
rows(
    variance,
    "aten::var.correction",
    "aten::std.correction",
    "aten::var_mean.correction",
    "aten::std_mean.correction",
)
rows(_keyword_keepdim, "aten::hash_tensor", "aten::count_nonzero.dim_IntList")
rows(reduction(1, 3), "aten::var.dim", "aten::std.dim", "aten::var_mean.dim", "aten::std_mean.dim")
rows(reduction(2, 3, None, (2,)), "aten::linalg_vector_norm")
rows(reduction(2, 3), "aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype")


def _selecting_rule(rule: Rule) -> Rule:
    """Return the rule of an operator whose values are elements of its argument.

    torch's kernels are for some dtypes, but a scalar of any dtype is its own selection.
    """

    def selecting(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        if x.dim() > 1:
            return rule(op, level, bdims, args, kwargs)
        ones = torch.ones(x.shape, device=x.device)
        (_, indices), _ = rule(op, level, bdims, [ones, *args[1:]], kwargs)
        return (x.clone(), indices), 0

    return selecting


rows(shift_arguments(Shift.SAME, Shift.DIMS)(_selecting_rule(reduction(1, 2, -1))), "aten::mode")
rows(
    shift_arguments(Shift.SAME, Shift.SAME, Shift.DIMS)(_selecting_rule(reduction(2, 3, -1))),
    "aten::kthvalue",
)
rows(
    shift_arguments(Shift.SAME, Shift.DIM)(_selecting_rule(along_dim())),
    "aten::cummax",
    "aten::cummin",
)
rows(arg_extreme, "aten::argmax", "aten::argmin")
rows(over_all_dims(_sum_all), "aten::sum")
rows(over_all_dims(torch.mean), "aten::mean")
rows(over_all_dims(torch.amax), "aten::max")
rows(over_all_dims(torch.amin), "aten::min")
rows(over_all_dims(torch.all), "aten::all")
rows(over_all_dims(torch.any), "aten::any")
rows(
    _along,
    "aten::cumsum",
    "aten::cumprod",
    "aten::logcumsumexp",
    "aten::_logcumsumexp",
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::_safe_softmax",
    "aten::softmax.int",
    "aten::log_softmax.int",
    "aten::special_softmax",
    "aten::special_log_softmax",
    "aten::glu",
)
rows(along_inplace, "aten::cumsum_", "aten::cumprod_")
rows(
    along_dim(2),
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
    "aten::glu_backward",
)
rows(along_dim(3), "aten::glu_jvp")
rows(along_dim(5), "aten::glu_backward_jvp")


@row("aten::count_nonzero")
def count_nonzero(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """``dim`` is an int or None; None is replaced by the list of all logical dims."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    dim = args[1] if len(args) > 1 else None
    if rank == 0:
        wrap_dim(dim or 0, 0)
        return torch.count_nonzero(x.unsqueeze(1), 1), 0
    if dim is None:
        return torch.count_nonzero(x, every_dim(rank, bdim)), 0
    target = physical_dim(dim, rank, bdim)
    return op(x, target), bdim - (target < bdim)
