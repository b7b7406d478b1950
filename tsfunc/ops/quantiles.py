"""Quantiles: sort the elements once; each quantile is an element or lies between two elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import broadcast_to_front, logical_rank, unit_dims, with_defaults, wrap_dim
from tsfunc.ops.refusal import raise_as_one_example, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row

_KINDS = ("linear", "lower", "higher", "midpoint", "nearest")


@row("aten::quantile", "aten::quantile.scalar", "aten::nanquantile", "aten::nanquantile.scalar")
def quantile(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Several quantiles are the first logical dim of the result."""
    (x, bdim), (q, q_bdim) = (args[0], bdims[0]), (args[1], bdims[1])
    dim, keepdim = with_defaults(args[2:], None, False)
    kind = kwargs.get("interpolation", "linear")
    rank, q_rank = logical_rank(x, bdim), logical_rank(q, q_bdim) if isinstance(q, Tensor) else 0
    fits = not isinstance(q, Tensor) or (q_rank < 2 and q.dtype is x.dtype)
    if kind not in _KINDS or not fits or not x.is_floating_point():
        return raise_as_one_example(op, bdims, args, kwargs)
    x = broadcast_to_front(x, bdim)
    if 0 in x.shape[1:]:
        return raise_as_one_example(op, bdims, args, kwargs)
    if dim is None:
        x = x.flatten(1) if rank else x.unsqueeze(1)
    else:
        dim = wrap_dim(dim, rank)
        x = x.movedim(dim + 1, -1) if rank else x.unsqueeze(1)
    q = _quantiles(q, q_bdim, x)
    out = _quantiles_of_rows(x.sort(-1).values, q, kind, "nan" in op.name())
    if keepdim and rank:
        reduced_dims = range(rank) if dim is None else [wrap_dim(dim, rank)]
        for d in reduced_dims:
            out = out.unsqueeze(d + 1)
    # The dim of the quantiles is last and moves before all logical dims.
    out = out.movedim(-1, 1) if q_rank else out.squeeze(-1)
    return (out, 0) if out.shape[0] == level.batch_size else (out.squeeze(0), None)


def _quantiles(q: Any, bdim: int | None, x: Tensor) -> Tensor:
    """Return quantiles as (batch, 1, ..., quantiles), which broadcast over the rows of ``x``."""
    if not isinstance(q, Tensor):
        q = torch.full((), q, dtype=x.dtype, device=x.device)
    require((q >= 0) & (q <= 1), "quantile() q values must be in the range [0, 1]")
    q = broadcast_to_front(q, bdim)
    q = q.unsqueeze(1) if q.dim() == 1 else q
    return unit_dims(q, 1, x.dim() - 2)


def _quantiles_of_rows(x: Tensor, q: Tensor, kind: str, ignore_nan: bool) -> Tensor:
    """Return the quantiles of sorted rows, with NaN last: (batch, ..., quantiles)."""
    if ignore_nan:
        count = x.isnan().logical_not().sum(-1, keepdim=True)
        position = q * (count - 1).to(x.dtype)
        position = position.masked_fill(count == 0, x.shape[-1] - 1)
    else:
        position = q * (x.shape[-1] - 1)
        position = torch.where(x[..., -1:].isnan(), x.shape[-1] - 1, position)
    if kind == "nearest":
        position = position.round()
    elif kind == "lower":
        position = position.floor()
    elif kind == "higher":
        position = position.ceil()
    shape = torch.broadcast_shapes(x.shape[:-1], position.shape[:-1])
    x, position = x.expand(*shape, -1), position.expand(*shape, -1)
    below = position.to(torch.int64)
    out: Tensor = x.gather(-1, below)
    if kind in ("linear", "midpoint"):
        above = x.gather(-1, position.ceil().to(torch.int64))
        weight = torch.full_like(position, 0.5) if kind == "midpoint" else position - below
        out = torch.lerp(out, above, weight)
    return out
