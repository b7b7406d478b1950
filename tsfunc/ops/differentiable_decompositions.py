"""Operators as decompositions that can be differentiated any number of times.

torch's own derivative formulas of these operators have wrong derivatives or none. Some treat
further results (such as the mean and deviation of a normalization) as constants, or divide by
numbers that can be zero. Some write in place into values that autograd has saved (the tangents of
``softmax``), and some have no derivative (fused attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tsfunc.ops import (
    attention_decompositions,
    differentiable_linalg,
    differentiable_norms,
    differentiable_sampling,
)
from tsfunc.ops.dims import in_accumulation_dtype


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::native_layer_norm``."""
    dims = list(range(-len(shape), 0))
    wide = in_accumulation_dtype(x)
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
    wide = in_accumulation_dtype(x)
    dims = [d for d in range(x.dim()) if d != 1]
    mean, var = wide.mean(dims), wide.var(dims, correction=0)
    out, scale = _normalize(wide, weight, bias, mean, var, eps)
    return out.to(x.dtype), mean.detach(), scale.detach()


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return a tensor normalized by statistics of its channels, and the scale of each channel."""
    scale = (var + eps).rsqrt()
    out = (x - _column(mean, x)) * _column(scale, x)
    out = out if weight is None else out * _column(weight, x)
    return out if bias is None else out + _column(bias, x), scale


def _column(of_channels: Tensor, x: Tensor) -> Tensor:
    """Return a vector with an element for each channel in a shape that broadcasts with ``x``."""
    return of_channels.reshape(-1, *[1] * (x.dim() - 2))


def _below_maximum(x: Tensor, dims: Any) -> tuple[Tensor, Tensor]:
    """Return a tensor less its maximum over dims, and the maximum; an infinite one counts as 0.

    The maximum of complex numbers is that of their real parts.
    """
    most = (x.real if x.is_complex() else x).amax(dims, keepdim=True).detach()
    most = most.masked_fill(most.isinf(), 0.0)
    return x - most, most


def softmax(x: Tensor, dim: int, to_float: bool) -> Tensor:
    """``aten::_softmax``; ``to_float`` takes half precision to single precision."""
    if not x.numel():
        return in_accumulation_dtype(x).clone() if to_float else x.clone()
    weights = _below_maximum(in_accumulation_dtype(x), dim)[0].exp()
    out = weights / weights.sum(dim, keepdim=True)
    return out if to_float else out.to(x.dtype)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``aten::_safe_softmax``: zeros where all elements are negative infinity."""
    x = x if dtype is None else x.to(dtype)
    empty = (x == float("-inf")).all(dim, keepdim=True)
    return softmax(x.masked_fill(empty, 0.0), dim, False).masked_fill(empty, 0.0)


def log_softmax(x: Tensor, dim: int, to_float: bool) -> Tensor:
    if not x.numel():
        return in_accumulation_dtype(x).clone() if to_float else x.clone()
    below = _below_maximum(in_accumulation_dtype(x), dim)[0]
    out = below - below.exp().sum(dim, keepdim=True).log()
    return out if to_float else out.to(x.dtype)


def logsumexp(x: Tensor, dims: list[int], keepdim: bool = False) -> Any:
    if not x.numel():
        return NotImplemented
    below, most = _below_maximum(in_accumulation_dtype(x), dims)
    out = below.exp().sum(dims, keepdim=True).log() + most
    return (out if keepdim else out.squeeze(dims)).to(x.dtype)


def copysign(x: Tensor, y: Tensor | float) -> Any:
    """``aten::copysign``; the derivative at 0 is 0, as torch's is."""
    if not isinstance(y, Tensor):
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        y = x.new_full((), y)
    if not x.is_floating_point():
        return NotImplemented
    x_sign, y_sign = x.detach().signbit(), y.detach().signbit()
    out = torch.where(x_sign == y_sign, x, -x)
    return torch.where(x == 0, out.detach(), out).to(torch.result_type(x, y))


def glu(x: Tensor, dim: int = -1) -> Tensor:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half) * x.narrow(dim, half, half).sigmoid()


def glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2
    gate = x.narrow(dim, half, half).sigmoid()
    by_gate = grad * x.narrow(dim, 0, half) * gate * (1 - gate)
    return torch.cat((grad * gate, by_gate), dim)


def _prefix_combine(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
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
    x = x.to(dtype) if dtype is not None else x
    return _prefix_combine(x, dim, torch.mul)


def logcumsumexp(x: Tensor, dim: int) -> Any:
    """``aten::logcumsumexp``.

    Not by ``torch.logaddexp``, whose second derivative is NaN where its operands are far apart.
    """
    if not x.numel():
        return NotImplemented
    wide = in_accumulation_dtype(x)
    out = _prefix_combine(wide, dim, lambda a, b: logsumexp(torch.stack((a, b)), [0]))
    return out.to(x.dtype)


def native_batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    """Batch norm, also with the arguments of operators that update statistics."""
    training, momentum, eps = rest if len(rest) == 3 else (True, *rest)
    if training:
        if mean is not None:  # updates the running statistics, whose tangents are left
            running = mean.detach(), var.detach()
            torch.native_batch_norm(x.detach(), None, None, *running, True, momentum, eps)
        return batch_norm(x, weight, bias, eps)
    if mean is None or var is None:
        return NotImplemented
    out, _ = _normalize(in_accumulation_dtype(x), weight, bias, mean, var, eps)
    return out.to(x.dtype), x.new_empty(0), x.new_empty(0)


def batch_norm_evaluating(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    """``aten::_native_batch_norm_legit_no_training``."""
    return native_batch_norm(x, weight, bias, mean, var, False, momentum, eps)


def cudnn_batch_norm(*args: Any) -> Any:
    """``aten::cudnn_batch_norm`` in evaluation."""
    return NotImplemented if args[5] else native_batch_norm(*args)


def _with_reserve(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batch norm with one more result, which only the operator's own derivative reads."""

    def with_reserve(x: Tensor, *args: Any) -> Any:
        results = norm(x, *args)
        if results is NotImplemented:
            return NotImplemented
        return *results, x.new_empty((0,), dtype=torch.uint8)

    return with_reserve


def batch_norm_no_stats(x: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    """``aten::_native_batch_norm_legit.no_stats``"""
    return native_batch_norm(x, weight, bias, None, None, *rest)


def _recompute_statistics(x: Tensor, scale: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return the mean and the scale over ``dims`` with their derivatives.

    Args:
        scale: the saved scale; it determines eps, which has no derivative.
    """
    var = x.var(dims, correction=0, keepdim=True)
    eps = scale.detach().square().reciprocal() - var.detach()
    return x.mean(dims, keepdim=True), (var + eps).rsqrt()


def _normalization_grad(
    x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor, dims: list[int]
) -> Tensor:
    """Return the gradient of ``(x - mean) * scale`` by ``x``, with statistics over ``dims``."""
    centered = (x - mean) * scale
    along = (grad * centered).mean(dims, keepdim=True)
    return (grad - grad.mean(dims, keepdim=True) - centered * along) * scale


def _in_layout_of(x: Tensor, cotangent: Tensor) -> Tensor:
    """Return a gradient in the layout of torch's operators for norms: channels last, or contiguous.

    A program views the result as its trace did, which has the operator's layout.
    """
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if last and not x.is_contiguous():
        return cotangent.contiguous(memory_format=torch.channels_last)
    return cotangent.contiguous()


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
    dims, wide, cotangent = (
        list(range(-len(shape), 0)),
        in_accumulation_dtype(x),
        in_accumulation_dtype(grad),
    )
    mean, scale = _recompute_statistics(wide, scale, dims)
    outer = list(range(x.dim() - len(shape)))
    by_normalized = cotangent if weight is None else cotangent * weight
    scaled = cotangent * (wide - mean) * scale
    return (
        _normalization_grad(wide, by_normalized, mean, scale, dims).to(x.dtype).contiguous()
        if mask[0]
        else None,
        _sum_over(scaled, outer).to(x.dtype) if mask[1] and weight is not None else None,
        _sum_over(cotangent, outer).to(x.dtype) if mask[2] and bias is not None else None,
    )


def _sum_over(x: Tensor, dims: list[int]) -> Tensor:
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
    """``aten::native_batch_norm_backward``; in training, the statistics are recomputed."""
    dims, wide, cotangent = (
        [d for d in range(x.dim()) if d != 1],
        in_accumulation_dtype(x),
        in_accumulation_dtype(grad),
    )
    by_normalized = cotangent if weight is None else cotangent * _column(weight, x)
    if training:
        mean = wide.mean(dims, keepdim=True)
        scale = (wide.var(dims, correction=0, keepdim=True) + eps).rsqrt()
    elif running_mean is None or running_var is None:
        return NotImplemented
    else:
        mean, scale = _column(running_mean, x), _column((running_var + eps).rsqrt(), x)
    by_x = None
    if mask[0]:
        by_x = (
            _normalization_grad(wide, by_normalized, mean, scale, dims)
            if training
            else by_normalized * scale
        )
    return (
        None if by_x is None else _in_layout_of(x, by_x.to(x.dtype)),
        (cotangent * (wide - mean) * scale).sum(dims).to(x.dtype) if mask[1] else None,
        cotangent.sum(dims).to(x.dtype) if mask[2] else None,
    )


def binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    by_x = grad * (x - target) / (x * (1 - x)).clamp_min(1e-12)
    by_x = by_x if weight is None else by_x * weight
    return by_x / x.numel() if reduction == 1 else by_x


def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    losses = functional.binary_cross_entropy(x, target, reduction="none")
    return _reduce(losses if weight is None else losses * weight, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    surprise = functional.logsigmoid(x)
    surprise = surprise if pos_weight is None else surprise * (1 + (pos_weight - 1) * target)
    losses = (1 - target) * x - surprise
    return _reduce(losses if weight is None else losses * weight, reduction)


def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduce(-functional.logsigmoid(target * x), reduction)


def soft_margin_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1
) -> Tensor:
    by_x = -grad * target * torch.sigmoid(-target * x)
    return by_x / x.numel() if reduction == 1 else by_x


def _reduce(losses: Tensor, reduction: int) -> Tensor:
    """Return losses after torch's reduction 0 (none), 1 (mean) or 2 (sum)."""
    if reduction == 0:
        return losses
    return losses.mean() if reduction == 1 else losses.sum()


def _class_weights(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return the dim of classes, the targets, True where one counts, and weights of examples."""
    counts = target != ignore_index
    target = torch.where(counts, target, 0)
    weights = x.new_ones(()) if weight is None else weight[target]
    return min(x.dim() - 1, 1), target, counts, torch.where(counts, weights, 0)


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """``aten::nll_loss_forward`` and ``aten::nll_loss2d_forward``."""
    classes, target, counts, weights = _class_weights(x, target, weight, ignore_index)
    picked = x.gather(classes, target.unsqueeze(classes)).squeeze(classes)
    # An infinite logarithm of an ignored example is not part of the loss.
    losses = -torch.where(counts, picked, 0) * weights
    if reduction == 0:
        return losses, x.new_zeros(())
    total = weights.sum()
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    """``aten::nll_loss_backward`` and ``aten::nll_loss2d_backward``."""
    classes, target, _, weights = _class_weights(x, target, weight, ignore_index)
    by_chosen = -grad * weights
    by_chosen = by_chosen / weights.sum() if reduction == 1 else by_chosen
    return torch.zeros_like(x).scatter(
        classes, target.unsqueeze(classes), by_chosen.unsqueeze(classes)
    )


def batch_norm_backward_with_reserve(*args: Any) -> Any:
    """``aten::batch_norm_backward``; only kernels of other devices read the last argument."""
    return batch_norm_backward(*args[:-1])


def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > -3) & (x < 3), grad / 6, 0.0)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::native_group_norm``."""
    wide = in_accumulation_dtype(x).reshape(n, groups, c // groups, size)
    mean = wide.mean([-2, -1], keepdim=True)
    scale = (wide.var([-2, -1], correction=0, keepdim=True) + eps).rsqrt()
    out = ((wide - mean) * scale).reshape(n, c, size)
    out = out if weight is None else out * weight.reshape(c, 1)
    out = out if bias is None else out + bias.reshape(c, 1)
    mean, scale = mean.reshape(n, groups), scale.reshape(n, groups)
    return out.reshape(x.shape).to(x.dtype), mean, scale


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    size: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """``aten::native_group_norm_backward`` with statistics recomputed from the input."""
    shape, dims = (n, groups, c // groups, size), [-2, -1]
    wide, cotangent = (
        in_accumulation_dtype(x).reshape(shape),
        in_accumulation_dtype(grad).reshape(shape),
    )
    mean, scale = _recompute_statistics(wide, scale.reshape(n, groups, 1, 1), dims)
    by_normalized = cotangent
    if weight is not None:
        by_normalized = cotangent * weight.reshape(1, groups, c // groups, 1)
    scaled = cotangent * (wide - mean) * scale
    return (
        _in_layout_of(
            x, _normalization_grad(wide, by_normalized, mean, scale, dims).reshape(x.shape)
        ).to(x.dtype)
        if mask[0]
        else None,
        scaled.sum([0, 3]).reshape(c).to(x.dtype) if mask[1] else None,
        cotangent.sum([0, 3]).reshape(c).to(x.dtype) if mask[2] else None,
    )


def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    """``aten::logit_backward``: zero where the value is clamped, else NaN outside of [0, 1]."""
    # torch takes a negative eps as no eps.
    margin, elsewhere = (0.0, math.nan) if eps is None or eps < 0 else (eps, 0.0)
    outside = (x < margin) | (x > 1 - margin)
    probability = torch.where(outside, 0.5, in_accumulation_dtype(x))
    by_x = in_accumulation_dtype(grad) / (probability * (1 - probability))
    return torch.where(outside, elsewhere, by_x).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """``aten::silu_backward``, which torch computes so if it is differentiated at once."""
    wide = in_accumulation_dtype(x)
    share = wide.sigmoid()
    return (in_accumulation_dtype(grad) * (share * (1 + wide * (1 - share))).conj()).to(x.dtype)


def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """``aten::mish_backward``, as above."""
    wide = in_accumulation_dtype(x)
    factor = torch.nn.functional.softplus(wide).tanh()
    slope = factor + wide * wide.sigmoid() * (1 - factor * factor)
    return (in_accumulation_dtype(grad) * slope).to(x.dtype)


DECOMPOSED: dict[str, Callable[..., Any]] = {
    **differentiable_linalg.PERTURBED,
    "aten::_softmax": softmax,
    "aten::_safe_softmax": safe_softmax,
    "aten::_log_softmax": log_softmax,
    "aten::logsumexp": logsumexp,
    "aten::cumprod": cumprod,
}
# The operators in torch's tangent formulas of these have a wrong derivative, or none.
TRACED_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::native_layer_norm": layer_norm,
    "aten::native_batch_norm": native_batch_norm,
    "aten::_native_batch_norm_legit": native_batch_norm,
    "aten::_native_batch_norm_legit.no_stats": batch_norm_no_stats,
    "aten::_batch_norm_with_update": _with_reserve(native_batch_norm),
    "aten::glu": glu,
}
# torch's formula writes the tangent of the value into the tangent of the tensor, which lacks each
# batch dim that the tensor lacks.
# The fused kernels of attention have no formula for tangents. torch computes the tangents of
# pullbacks of losses by TorchScript, which reads sizes as numbers and fixes those of a program.
PUSHED_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::fill_.Tensor": Tensor.copy_,
    "aten::nll_loss_backward": nll_loss_backward,
    "aten::nll_loss2d_backward": nll_loss_backward,
    "aten::view_copy": lambda x, size: x.reshape(size).clone(),  # torch views the tangent
    **{
        name: form
        for name, form in attention_decompositions.FORWARD.items()
        if name not in attention_decompositions.MASKED
    },
    **differentiable_linalg.PUSHED,
    **differentiable_norms.PUSHED,
}
# torch has no derivative of attention by its mask, and no tangents.
MASKED: dict[str, Callable[..., Any]] = attention_decompositions.MASKED
# torch takes weights, statistics and a target (the arguments after the first ones) for constants:
# its reverse mode refuses them, and its forward mode ignores their tangents.
WEIGHTED: dict[str, tuple[Callable[..., Any], int]] = {
    "aten::binary_cross_entropy": (binary_cross_entropy, 2),
    "aten::binary_cross_entropy_with_logits": (binary_cross_entropy_with_logits, 2),
    "aten::soft_margin_loss": (soft_margin_loss, 1),
    "aten::soft_margin_loss_backward": (soft_margin_loss_backward, 2),
    "aten::nll_loss_forward": (nll_loss, 2),
    "aten::nll_loss2d_forward": (nll_loss, 2),
    "aten::nll_loss_backward": (nll_loss_backward, 3),
    "aten::nll_loss2d_backward": (nll_loss_backward, 3),
    "aten::native_batch_norm": (native_batch_norm, 3),
    "aten::_native_batch_norm_legit": (native_batch_norm, 3),
    "aten::_native_batch_norm_legit_no_training": (batch_norm_evaluating, 3),
    "aten::_batch_norm_no_update": (_with_reserve(batch_norm_evaluating), 3),
    "aten::cudnn_batch_norm": (_with_reserve(cudnn_batch_norm), 3),
    "aten::miopen_batch_norm": (native_batch_norm, 3),
    "aten::binary_cross_entropy_backward": (binary_cross_entropy_backward, 3),
    "aten::native_batch_norm_backward": (batch_norm_backward, 3),
    "aten::batch_norm_backward": (batch_norm_backward_with_reserve, 3),
}
# Two derivatives of torch's formulas are wrong or fail, even without tangents.
TWICE_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::copysign.Tensor": copysign,
    "aten::copysign.Scalar": copysign,
    **differentiable_linalg.FACTORED,
    **differentiable_norms.NORMS,
}
# torch's formula is not differentiable where singular values are equal, fails for the second
# derivative in a trace (group norm), or has a wrong second derivative where cotangents are zero
# (logcumsumexp). These are replaced inside of nested derivatives alone, since they take longer.
NESTED_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::_linalg_det": differentiable_linalg.linalg_det,
    "aten::native_group_norm": group_norm,
    "aten::logcumsumexp": logcumsumexp,
}
# torch's formulas of these backward operators are correct for one derivative only: those of
# normalizations treat the statistics as constants, that of glu has no derivative of its tangents,
# and that of the cross entropy writes in place.
BACKWARD_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::glu_backward": glu_backward,
    "aten::binary_cross_entropy_backward": binary_cross_entropy_backward,
    "aten::native_layer_norm_backward": layer_norm_backward,
    "aten::native_batch_norm_backward": batch_norm_backward,
    "aten::batch_norm_backward": batch_norm_backward_with_reserve,
    "aten::native_group_norm_backward": group_norm_backward,
    **differentiable_linalg.BACKWARD,
    **differentiable_norms.BACKWARD,
}
# Backward operators that have no derivative at all, or no tangents.
UNDIFFERENTIABLE_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "aten::logit_backward": logit_backward,
    "aten::hardsigmoid_backward": hardsigmoid_backward,
    "aten::silu_backward": silu_backward,
    "aten::mish_backward": mish_backward,
    **attention_decompositions.BACKWARD,
    **differentiable_norms.UNDIFFERENTIABLE_BACKWARD,
    **differentiable_sampling.BACKWARD,
}
