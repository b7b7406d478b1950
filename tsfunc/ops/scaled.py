"""Products of scaled float8 matrices.

torch has no batched kernel. If the second matrix, the scales and the bias are unbatched, the rows
of all examples form one matrix. Otherwise the product is computed in float32, as by the CPU
kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import batch_to_front, with_defaults
from tsfunc.ops.refusal import refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row

_FLOAT8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_BY_TENSOR, _BY_ROW = 0, 1  # torch.nn.functional.ScalingType; other types scale blocks


def _matrix(x: Tensor, bdim: int | None) -> Tensor:
    """Return a matrix, or a scale that broadcasts with one, with the batch dim first."""
    if bdim is None:
        return x
    x = batch_to_front(x, bdim)
    return x.reshape(x.shape[0], *[1] * (3 - x.dim()), *x.shape[1:])


def _scale(x: Tensor, bdim: int | None, scale: Tensor, scale_bdim: int | None) -> Tensor:
    return _matrix(x, bdim).float() * _matrix(scale, scale_bdim)


def _sum(out: Tensor, bias: Tensor | None, bdim: int | None, dtype: torch.dtype) -> Any:
    out = (out if bias is None else out + _matrix(bias, bdim)).to(dtype)
    return out, 0 if out.dim() == 3 else None


@row("aten::_scaled_mm")
@refuse_like_torch
def scaled_mm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return ``self @ mat2``, each multiplied by its scale.

    The CPU kernel applies the scale of a float8 result depending on the bias, so the per-example
    loop runs such calls.
    """
    x, y, by_x, by_y, bias, by_out, dtype, _ = with_defaults(args, *[None] * 7, False)
    p, q, s, t, b, *_ = with_defaults(bdims, *[None] * 8)
    if p is not None and all(bdim is None for bdim in bdims[1:]) and by_x.numel() == 1:
        rows = batch_to_front(x, p)
        return op(rows.flatten(0, 1), *args[1:]).unflatten(0, rows.shape[:2]), 0
    dtype = dtype or x.dtype
    if by_out is not None and dtype in _FLOAT8:
        return NotImplemented
    return _sum(_scale(x, p, by_x, s) @ _scale(y, q, by_y, t), bias, b, dtype)


@row("aten::_scaled_mm_v2")
@refuse_like_torch
def scaled_mm_v2(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Multiply scaled matrices whose scales are lists, of one scale per tensor or per row each.

    Lists of more scales are left to the fallback.
    """
    x, y, by_x, of_x, _, by_y, of_y, _, bias, dtype, contracted, _ = with_defaults(
        args, *[None] * 10, (), False
    )
    kinds = [*of_x, *of_y]
    if len(kinds) != 2 or not {*kinds} <= {_BY_TENSOR, _BY_ROW} or contracted:
        return NotImplemented
    s, t = (None if bdim is None else bdim[0] for bdim in (bdims[2], bdims[5]))
    product = _scale(x, bdims[0], by_x[0], s) @ _scale(y, bdims[1], by_y[0], t)
    return _sum(product, bias, bdims[8], dtype or x.dtype)
