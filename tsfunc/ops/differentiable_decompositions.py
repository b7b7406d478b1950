"""Operators as decompositions that can be differentiated any number of times.

torch's own derivative formulas of these operators treat further results (such as the mean and
deviation of a normalization) as constants, or divide by numbers that can be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """Return the tensor in the dtype in which kernels of half precision accumulate."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::native_layer_norm``."""
    dims = list(range(-len(shape), 0))
    wide = _wide(x)
    mean = wide.mean(dims, keepdim=True)
    scale = (wide.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    # The statistics alone have no derivative.
    return out.to(x.dtype), mean.detach(), scale.detach()


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::native_batch_norm`` in training, without the update of running statistics."""
    wide = _wide(x)
    dims = [d for d in range(x.dim()) if d != 1]
    mean, var = wide.mean(dims), wide.var(dims, correction=0)
    scale = (var + eps).rsqrt()

    def column(v: Tensor) -> Tensor:
        return v.reshape(-1, *[1] * (x.dim() - 2))

    out = (wide - column(mean)) * column(scale)
    out = out if weight is None else out * column(weight)
    out = out if bias is None else out + column(bias)
    return out.to(x.dtype), mean.detach(), scale.detach()


def _scanned(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine all prefixes by doubling: each step combines twice as many elements."""
    if not x.dim():
        return x.clone()
    size, step = x.shape[dim], 1
    while step < size:
        head, before = x.narrow(dim, 0, step), x.narrow(dim, 0, size - step)
        x = torch.cat((head, combine(x.narrow(dim, step, size - step), before)), dim)
        step *= 2
    return x


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """``aten::cumprod``."""
    x = x.to(dtype) if dtype is not None else x
    return _scanned(x, dim, torch.mul)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """``aten::logcumsumexp``."""
    return _scanned(x, dim, torch.logaddexp)


def native_batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    """Batch norm in training, also with the arguments of operators that update statistics."""
    training, momentum, eps = rest if len(rest) == 3 else (True, *rest)
    if not training:
        return NotImplemented
    if mean is not None:  # updates the running statistics
        torch.native_batch_norm(x.detach(), None, None, mean, var, True, momentum, eps)
    return batch_norm(x, weight, bias, eps)


def batch_norm_with_update(*args: Any) -> Any:
    """``aten::_batch_norm_with_update``; only its own derivative reads the last result."""
    x = args[0]
    return (*native_batch_norm(*args), x.new_empty((0,), dtype=torch.uint8))


def batch_norm_no_stats(x: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    """``aten::_native_batch_norm_legit.no_stats``"""
    return native_batch_norm(x, weight, bias, None, None, *rest)


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten::triangular_solve``, which also returns the matrix."""
    matrix = a.mT if transpose else a
    solve = torch.linalg.solve_triangular
    return solve(matrix, b, upper=upper != transpose, unitriangular=unitriangular), a.clone()


def _pulled_back(x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor, dims: list[int]) -> Tensor:
    """Return the gradient of ``(x - mean) * scale`` by ``x``, with statistics over ``dims``."""
    centered = (x - mean) * scale
    along = (grad * centered).mean(dims, keepdim=True)
    return (grad - grad.mean(dims, keepdim=True) - centered * along) * scale


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """``aten::native_layer_norm_backward`` with statistics recomputed from the input."""
    dims, wide, cotangent = list(range(-len(shape), 0)), _wide(x), _wide(grad)
    mean = wide.mean(dims, keepdim=True)
    var = wide.var(dims, correction=0, keepdim=True)
    # The saved scale determines eps, which has no derivative.
    eps = scale.detach().square().reciprocal() - var.detach()
    scale = (var + eps).rsqrt()
    outer = list(range(x.dim() - len(shape)))
    pulled = cotangent if weight is None else cotangent * weight
    scaled = cotangent * (wide - mean) * scale
    return (
        _pulled_back(wide, pulled, mean, scale, dims).to(x.dtype) if mask[0] else None,
        _summed(scaled, outer).to(x.dtype) if mask[1] and weight is not None else None,
        _summed(cotangent, outer).to(x.dtype) if mask[2] and bias is not None else None,
    )


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    scale: Tensor | None,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    """``aten::native_batch_norm_backward`` with statistics recomputed from the input."""
    if not training:
        return NotImplemented
    dims, wide, cotangent = [d for d in range(x.dim()) if d != 1], _wide(x), _wide(grad)
    mean = wide.mean(dims, keepdim=True)
    scale = (wide.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    pulled = cotangent
    if weight is not None:
        pulled = cotangent * weight.reshape(-1, *[1] * (x.dim() - 2))
    return (
        _pulled_back(wide, pulled, mean, scale, dims).to(x.dtype) if mask[0] else None,
        (cotangent * (wide - mean) * scale).sum(dims).to(x.dtype) if mask[1] else None,
        cotangent.sum(dims).to(x.dtype) if mask[2] else None,
    )


def _weights(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """Return the weights of attention, the log-sum-exp of the scores, and the scale."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _wide(query) @ _wide(key).mT * scale
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, float("-inf"))
    # A row without a score that counts has weights of 0, as in torch's kernels.
    return torch.ops.aten._safe_softmax(scores, -1), scores.logsumexp(-1), scale


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``."""
    if dropout_p:
        return NotImplemented
    weights, norm, _ = _weights(query, key, is_causal, attn_mask, scale)
    return (weights @ _wide(value)).to(query.dtype), norm.detach()


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    norm: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_flash_attention_for_cpu_backward``; recomputes the weights."""
    if dropout_p:
        return NotImplemented
    weights, _, scale = _weights(query, key, is_causal, attn_mask, scale)
    cotangent = _wide(grad)
    pulled = cotangent @ _wide(value).mT
    scores = weights * (pulled - (pulled * weights).sum(-1, keepdim=True)) * scale
    return (
        (scores @ _wide(key)).to(query.dtype),
        (scores.mT @ _wide(query)).to(key.dtype),
        (weights.mT @ cotangent).to(value.dtype),
    )


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::native_layer_norm": layer_norm,
    "aten::native_batch_norm": native_batch_norm,
    "aten::_native_batch_norm_legit": native_batch_norm,
    "aten::_native_batch_norm_legit.no_stats": batch_norm_no_stats,
    "aten::_batch_norm_with_update": batch_norm_with_update,
    "aten::cumprod": cumprod,
    "aten::logcumsumexp": logcumsumexp,
    "aten::triangular_solve": triangular_solve,
}
# torch's formula writes the tangent of the value into the tangent of the tensor, which lacks each
# batch dim that the tensor lacks.
# The fused kernels of attention have no formula for tangents.
PUSHED_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::fill_.Tensor": Tensor.copy_,
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention,
}
# torch's formulas of these backward operators are correct for one derivative only: they treat the
# statistics as constants.
BACKWARD_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::native_layer_norm_backward": layer_norm_backward,
    "aten::native_batch_norm_backward": batch_norm_backward,
}
# Backward operators that have no derivative at all.
UNDIFFERENTIABLE_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
