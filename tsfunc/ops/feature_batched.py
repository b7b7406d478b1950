"""Normalization over features: the batch dim joins the dims that are not normalized.

Batched weights and biases are applied after the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.channels_last import channels_last
from tsfunc.ops.dims import align, batch_to_front, batches_first
from tsfunc.ops.refusal import refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def _affine(
    out: Tensor,
    bdim: int | None,
    scale: tuple[Tensor | None, int | None],
    shift: tuple[Tensor | None, int | None],
) -> tuple[Tensor, int | None]:
    """Return ``out * scale + shift``; both are aligned with the last dims of ``out``."""
    weight, p = scale
    if weight is not None:
        if bdim is None and p is None:
            out = out * weight
        else:
            (out, weight), bdim = align((out, weight), (bdim, p))
            out = out * weight
    bias, q = shift
    if bias is not None:
        if bdim is None and q is None:
            return out + bias, None
        (out, bias), bdim = align((out, bias), (bdim, q))
        out = out + bias
    return out, bdim


def _column(x: Tensor | None, bdim: int | None, right: int) -> tuple[Tensor | None, int | None]:
    """Return one value per channel, with ``right`` dims of size 1 after the channels."""
    if x is None:
        return None, None
    x = batch_to_front(x, bdim)
    for _ in range(right):
        x = x.unsqueeze(-1)
    return x, None if bdim is None else 0


@row("aten::native_layer_norm")
@refuse_like_torch
def native_layer_norm(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The batch dim is an additional dim before the normalized dims."""
    x, shape, weight, bias, eps = args
    bdim, p, q = bdims[0], bdims[2], bdims[3]
    if bdim is not None and bdim > x.dim() - 1 - len(shape):
        x, bdim = x.movedim(bdim, 0), 0
    if p is None and q is None:
        out, mean, rstd = op(x, shape, weight, bias, eps)
        return (out, mean, rstd), bdim
    out, mean, rstd = op(x, shape, None, None, eps)
    out, to = _affine(out, bdim, (weight, p), (bias, q))
    return (out, mean, rstd), (to, bdim, bdim)


@row("aten::layer_norm")
@refuse_like_torch
def layer_norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Normalize the last dims of each example; the statistics are not returned."""
    x, bdim = args[0], bdims[0]
    weight = args[2] if len(args) > 2 else None
    bias = args[3] if len(args) > 3 else None
    p = bdims[2] if len(bdims) > 2 else None
    q = bdims[3] if len(bdims) > 3 else None
    if bdim is not None and bdim > x.dim() - 1 - len(args[1]):
        x, bdim = x.movedim(bdim, 0), 0
    if p is None and q is None:
        return op(x, *args[1:], **kwargs), bdim
    return _affine(op(x, args[1], None, None, *args[4:]), bdim, (weight, p), (bias, q))


def _over_leading(x: Tensor, leading: int) -> Tensor:
    """Sum over the logical dims before those of a weight; the batch dim is first."""
    return x.sum(list(range(1, leading + 1))) if leading else x


@row("aten::native_layer_norm_backward")
def native_layer_norm_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The kernel computes the input's gradient; weight gradients are summed per example here."""
    grad, x, shape, mean, rstd, weight, _, mask = args
    size = level.batch_size
    of_tensors = (bdims[0], bdims[1], bdims[3], bdims[4])
    grad, x, mean, rstd = batches_first((grad, x, mean, rstd), of_tensors, size)
    leading = x.dim() - 1 - len(shape)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        scaled, p = grad, bdims[5]
        if p is not None:
            (scaled, weight), _ = align((grad, weight), (0, p))
            scaled, weight = scaled * weight, None
        # The kernel ignores strides, and reads past the end of expanded tensors.
        parts = [v.contiguous() for v in (scaled, x)]
        stats = [v.contiguous() for v in (mean, rstd)]
        grad_x = op(*parts, shape, *stats, weight, None, [True, False, False])[0]
    if mask[1]:
        grad_weight = _over_leading((x - mean) * rstd * grad, leading)
    if mask[2]:
        grad_bias = _over_leading(grad, leading)
    return (grad_x, grad_weight, grad_bias), 0


@row("aten::native_group_norm")
@refuse_like_torch
def native_group_norm(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch into N, the dim of size ``args[3]``."""
    x, weight, bias, n, *rest = args
    bdim, p, q = bdims[:3]
    if bdim is not None:
        x, n = batch_to_front(x, bdim).flatten(0, 1), n * level.batch_size
    separate = p is not None or q is not None
    inner = (None, None) if separate else (weight, bias)
    # The kernel requires one of these layouts; devices other than the CPU require contiguous
    # tensors.
    last = x.device.type == "cpu" and channels_last(x, None)
    spatial = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    x = x.contiguous(memory_format=spatial if last else torch.contiguous_format)
    results = op(x, *inner, n, *rest)
    if bdim is not None:
        results = [r.unflatten(0, (level.batch_size, args[3])) for r in results]
        bdim = 0
    out, mean, rstd = results
    to = bdim
    if separate:
        right = x.dim() - 2
        out, to = _affine(out, bdim, _column(weight, p, right), _column(bias, q, right))
    return (out, mean, rstd), (to, bdim, bdim)


@row("aten::native_group_norm_backward")
def native_group_norm_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The kernel computes the input's gradient, with the batch in N.

    The gradients of the weights are summed here.
    """
    grad, x, mean, rstd, weight, n, c, hw, group, mask = args
    size = level.batch_size
    grad, x, mean, rstd = batches_first(args[:4], bdims[:4], size)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        scaled, p = grad, bdims[4]
        if p is not None:
            column, _ = _column(weight, p, x.dim() - 3)
            assert column is not None
            scaled, weight = grad * column.unsqueeze(1), None
        parts = [v.flatten(0, 1).contiguous() for v in (scaled, x, mean, rstd)]
        only = [True, False, False]
        grad_x = op(*parts, weight, n * size, c, hw, group, only)[0].unflatten(0, (size, n))
    inner = grad.reshape(size, n, group, c // group, hw)
    if mask[1]:
        grouped = x.reshape(size, n, group, c // group, hw)
        normal = (grouped - mean[..., None, None]) * rstd[..., None, None]
        grad_weight = (inner * normal).sum((1, 4)).flatten(1)
    if mask[2]:
        grad_bias = inner.sum((1, 4)).flatten(1)
    return (grad_x, grad_weight, grad_bias), 0


@row("aten::_fused_rms_norm")
def fused_rms_norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim is an additional dim before the normalized dims."""
    x, shape, weight, eps = args
    bdim, p = bdims[0], bdims[2]
    if bdim is not None and bdim > x.dim() - 1 - len(shape):
        x, bdim = x.movedim(bdim, 0), 0
    if p is None:
        return op(x, shape, weight, eps), bdim
    out, rstd = op(x, shape, None, eps)
    out, to = _affine(out, bdim, (weight, p), (None, None))
    return (out, rstd), (to, bdim)


@row("aten::_fused_rms_norm_backward")
def fused_rms_norm_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Compute the gradients of ``fused_rms_norm`` as those of a layer norm with a mean of zero."""
    grad, x, shape, rstd, weight, mask = args
    size = level.batch_size
    grad, x, rstd = batches_first((grad, x, rstd), (bdims[0], bdims[1], bdims[3]), size)
    grad_x = grad_weight = None
    if mask[0]:
        scaled = grad
        if bdims[4] is not None:
            (scaled, weight), _ = align((grad, weight), (0, bdims[4]), grad.dim() - 1)
            scaled, weight = scaled * weight, None
        parts = [v.contiguous() for v in (scaled, x)]
        grad_x = op(*parts, shape, rstd.contiguous(), weight, [True, False])[0]
    if mask[1]:
        grad_weight = _over_leading(x * rstd * grad, x.dim() - 1 - len(shape))
    return (grad_x, grad_weight), 0
