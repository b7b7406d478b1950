"""Norms and distances as decompositions that can be differentiated any number of times.

torch's formulas write in place into values that autograd has saved, or (``cdist``, ``pdist``) have
no derivative. At zero, where a norm has no derivative, the derivatives here are zero as torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import in_accumulation_dtype


def _zero_safe(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``f(x)`` where ``x`` is not zero, and elsewhere zero with the derivative zero."""
    zero = x == 0
    return torch.where(zero, 0.0, f(torch.where(zero, 1.0, x)))


def _other_dims(x: Tensor, dim: int) -> list[int]:
    return [d for d in range(x.dim()) if d != dim % x.dim()]


def vector_norm(
    x: Tensor,
    ord: float | None = 2,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """``aten::linalg_vector_norm`` and ``aten::norm``."""
    power = 2.0 if ord is None else float(ord)
    if power == 0:
        return NotImplemented  # counts elements
    wide = in_accumulation_dtype(x if dtype is None else x.to(dtype))
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    dims = dims or list(range(x.dim()))
    if power == 2:
        squares = (wide * wide.conj()).real if wide.is_complex() else wide * wide
        out = _zero_safe(squares.sum(dims, keepdim), torch.sqrt)
    elif math.isinf(power):
        if not x.numel():
            return NotImplemented
        size = wide.abs()
        out = size.amax(dims, keepdim) if power > 0 else size.amin(dims, keepdim)
    elif power == 1:
        out = wide.abs().sum(dims, keepdim)
    elif power > 0:
        powers = _zero_safe(wide.abs(), lambda a: a.pow(power))
        out = _zero_safe(powers.sum(dims, keepdim), lambda a: a.pow(1 / power))
    else:
        out = wide.abs().pow(power).sum(dims, keepdim).pow(1 / power)
    real = (x.dtype if dtype is None else dtype).to_real()
    return out.to(real)


def std(
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    var: Tensor = torch.ops.aten.var.correction(x, dim, correction=correction, keepdim=keepdim)
    return _zero_safe(var, torch.sqrt)


def std_mean(
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    var, mean = torch.ops.aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)
    return _zero_safe(var, torch.sqrt), mean


def sgn(x: Tensor) -> Any:
    if not x.is_complex():
        return NotImplemented  # its derivative is zero
    zero = x == 0
    square = (x * x.conj()).real
    return torch.where(zero, 0.0, x / torch.where(zero, 1.0, square).sqrt())


def dist(x: Tensor, y: Tensor, p: float = 2) -> Any:
    return vector_norm(x - y, p)


def cosine_embedding_loss(
    x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    dim = target.dim()
    squares = ((x * x).sum(dim) + 1e-12) * ((y * y).sum(dim) + 1e-12)
    cosine = (x * y).sum(dim) / squares.sqrt()
    loss_of_unlike = torch.where(target == -1, (cosine - margin).clamp_min(0), 0.0)
    loss = torch.where(target == 1, 1 - cosine, loss_of_unlike)
    if reduction == 0:
        return loss
    return loss.mean() if reduction == 1 else loss.sum()


def renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Any:
    norm = vector_norm(in_accumulation_dtype(x), p, _other_dims(x, dim), True)
    if norm is NotImplemented:
        return norm
    longer = norm > maxnorm
    factor = torch.where(longer, maxnorm / (torch.where(longer, norm, 1.0) + 1e-7), 1.0)
    return (in_accumulation_dtype(x) * factor).to(x.dtype)


def _differences(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-2) - y.unsqueeze(-3)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device).unbind(0)
    return first, second


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """``aten::_cdist_forward`` and ``aten::_euclidean_dist``."""
    return vector_norm(_differences(x, y), p, -1)


def pdist(x: Tensor, p: float = 2.0) -> Any:
    """``aten::_pdist_forward``."""
    first, second = _pairs(x)
    return vector_norm(x[first] - x[second], p, -1)


def _directions(differences: Tensor, p: float) -> Tensor:
    """Return the derivatives of the norms over the last dim, with torch's choice at ties."""
    if p == 0:
        return torch.zeros_like(differences)
    if p == 1:
        return differences.sgn()
    norm = vector_norm(differences, p, -1, True)
    if math.isinf(p):
        return torch.where(differences.abs() == norm, differences.sgn(), 0.0)
    if p == 2:
        return differences * _zero_safe(norm, torch.reciprocal)
    powers = _zero_safe(differences.abs(), lambda a: a.pow(p - 1))
    return differences.sgn() * powers * _zero_safe(norm, lambda a: a.pow(1 - p))


def cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """``aten::_cdist_backward``: the gradient by the first argument."""
    return (grad.unsqueeze(-1) * _directions(_differences(x, y), p)).sum(-2)


def pdist_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    first, second = _pairs(x)
    by_difference = grad.unsqueeze(-1) * _directions(x[first] - x[second], p)
    return (
        torch.zeros_like(x).index_add(0, first, by_difference).index_add(0, second, -by_difference)
    )


def weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """``aten::_weight_norm_interface_backward``, with the norms recomputed from the weight."""
    if v.dim() == 1:  # each element is a row; a reduction over no dims would be one over all
        grad, v, g, norms = (x.unsqueeze(-1) for x in (grad, v, g, norms))
        by_v, by_g = weight_norm_backward(grad, v, g, norms, 0)
        return by_v.squeeze(-1), by_g.squeeze(-1)
    dims = _other_dims(v, dim)
    norm = vector_norm(in_accumulation_dtype(v), 2, dims, True)
    unit = in_accumulation_dtype(v) / norm
    along = (grad * unit).sum(dims, keepdim=True)
    return ((g / norm) * (grad - unit * along)).to(v.dtype), along.to(g.dtype)


# torch's formulas write in place.
NORMS: dict[str, Callable[..., Any]] = {
    "aten::linalg_vector_norm": vector_norm,
    "aten::norm.Scalar": vector_norm,
    "aten::norm.ScalarOpt_dim": vector_norm,
    "aten::norm.ScalarOpt_dtype": vector_norm,
    "aten::norm.ScalarOpt_dim_dtype": vector_norm,
    "aten::cosine_embedding_loss": cosine_embedding_loss,
    "aten::dist": dist,
    "aten::std.correction": std,
    "aten::std_mean.correction": std_mean,
    "aten::sgn": sgn,
    "aten::renorm": renorm,
    "aten::_euclidean_dist": cdist,
}
# torch has no formula for their tangents.
PUSHED: dict[str, Callable[..., Any]] = {
    "aten::_cdist_forward": cdist,
    "aten::_pdist_forward": pdist,
}
# torch's formula takes the norms as constants.
BACKWARD: dict[str, Callable[..., Any]] = {
    "aten::_weight_norm_differentiable_backward": weight_norm_backward
}
# These have no derivative.
UNDIFFERENTIABLE_BACKWARD: dict[str, Callable[..., Any]] = {
    "aten::_cdist_backward": cdist_backward,
    "aten::_pdist_backward": pdist_backward,
    "aten::_weight_norm_interface_backward": weight_norm_backward,
}
