"""Losses: computed for every element, then reduced separately for each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    align,
    batch_to_front,
    every_dim,
    expand_at,
    expand_to_front,
    flatten_logical,
    logical_rank,
)
from tsfunc.ops.refusal import refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows

NONE, MEAN = 0, 1  # the reduction argument of losses; 2 is the sum


def reduced(out: Tensor, bdim: int, reduction: int) -> tuple[Tensor, int]:
    """Reduce over all logical dims by mean or sum.

    Without a reduction, return the tensor unchanged.
    """
    if reduction == NONE:
        return out, bdim
    dims = every_dim(out.dim() - 1, bdim)
    if not dims:
        return out, 0
    return (out.mean(dims) if reduction == MEAN else out.sum(dims)), 0


def _broadcast(args: Sequence[Any], bdims: BatchDims) -> tuple[list[Any], int]:
    """Align and expand the tensors; missing weights stay None."""
    aligned, bdim = align(args, bdims)
    shape = torch.broadcast_shapes(*(x.shape for x in aligned if x is not None))
    return [None if x is None else x.expand(shape) for x in aligned], bdim


def _size_without(out: Tensor, bdim: int) -> Any:
    count = 1
    for dim, size in enumerate(out.shape):
        if dim != bdim:
            count = count * size
    return count


def pointwise_loss(count: int) -> Rule:
    """Return the rule of a loss with ``count`` tensors, a reduction and possibly a number."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        tensors = [*args[:count], None, None][:count]
        reduction = args[count] if len(args) > count else MEAN
        aligned, bdim = _broadcast(tensors, [*bdims[:count], None, None][:count])
        return reduced(op(*aligned, NONE, *args[count + 1 :]), bdim, reduction)

    return rule


def pointwise_loss_backward(count: int) -> Rule:
    """Return the rule of the backward operator; its first tensor, the gradient, is expanded."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        tensors = [*args[:count], None][:count]
        reduction = args[count] if len(args) > count else MEAN
        aligned, bdim = _broadcast(tensors, [*bdims[:count], None][:count])
        out = op(*aligned, NONE, *args[count + 1 :])
        return (out / _size_without(out, bdim) if reduction == MEAN else out), bdim

    return rule


rows(
    refuse_like_torch(pointwise_loss(2)),
    "aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::soft_margin_loss",
)  # fmt: skip
rows(refuse_like_torch(pointwise_loss(3)), "aten::binary_cross_entropy")
rows(refuse_like_torch(pointwise_loss(4)), "aten::binary_cross_entropy_with_logits")
rows(
    pointwise_loss_backward(3),
    "aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward",
    "aten::soft_margin_loss_backward",
)  # fmt: skip
rows(pointwise_loss_backward(4), "aten::binary_cross_entropy_backward")


def _class_losses(
    level: RuleLevel,
    bdims: BatchDims,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore: Any,
) -> tuple[Tensor, int, Tensor, Tensor]:
    """Return ``x`` with its batch dim first, its dim of classes, the targets and their weights.

    An ignored target counts as class 0 with weight 0.
    """
    size = level.batch_size
    x = expand_to_front(x, bdims[0], size)
    classes = 1 if x.dim() == 2 else 2
    target = batch_to_front(target, bdims[1])
    ignored = target == ignore
    target = torch.where(ignored, 0, target)
    if weight is None:
        counted = (~ignored).to(x.dtype)
    elif bdims[2] is None:
        counted = weight[target].masked_fill(ignored, 0)
    else:
        shape = target.shape if bdims[1] is not None else (size, *target.shape)
        flat = flatten_logical(target.expand(shape))
        counted = (
            batch_to_front(weight, bdims[2]).gather(1, flat).view(shape).masked_fill(ignored, 0)
        )
    shape = x.shape[:classes] + x.shape[classes + 1 :]
    return x, classes, target.expand(shape).unsqueeze(classes), counted.expand(shape)


@row("aten::nll_loss_forward", "aten::nll_loss2d_forward")
@refuse_like_torch
def nll_loss_forward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Look up the value of each target; also return the sum of the targets' weights."""
    x, target, weight, reduction, ignore = args
    x, classes, target, counted = _class_losses(level, bdims, x, target, weight, ignore)
    value = x.gather(classes, target).squeeze(classes)
    # ``where`` masks ignored values, which can be infinite.
    loss = -torch.where(counted == 0, 0, value * counted)
    if reduction == NONE:  # the kernel does not sum the weights then, except for a single sample
        return ((loss, counted), 0) if loss.dim() == 1 else ((loss, x.new_zeros(())), (0, None))
    total = counted.flatten(1).sum(1) if counted.dim() > 1 else counted
    loss = loss.flatten(1).sum(1) if loss.dim() > 1 else loss
    return (loss / total if reduction == MEAN else loss, total), 0


@row("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Write the gradient at the position of each target."""
    grad, x, target, weight, reduction, ignore, total = args
    x, classes, target, counted = _class_losses(level, bdims[1:4], x, target, weight, ignore)
    grad = batch_to_front(grad, bdims[0])
    if reduction == MEAN:
        grad = grad / batch_to_front(total, bdims[6])
    if bdims[0] is not None or (reduction == MEAN and bdims[6] is not None):
        grad = grad.reshape(*grad.shape, *[1] * (counted.dim() - grad.dim()))
    value = -torch.where(counted == 0, 0, counted * grad)
    return torch.zeros_like(x).scatter(classes, target, value.unsqueeze(classes)), 0


def _fold_into_samples(x: Tensor, bdim: int | None, size: int, lead: int) -> Tensor:
    """Fold the batch into the samples; a tensor without a dim of samples gets one of size 1."""
    x = expand_to_front(x, bdim, size)
    if lead > 0:
        return x.flatten(0, 1)
    return x.unsqueeze(1) if lead < 0 else x


@row("aten::multi_margin_loss")
@refuse_like_torch
def multi_margin_loss(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch into the samples."""
    options = [*args, *(1, 1, None, MEAN)[len(args) - 2 :]]
    x, target, p, margin, weight, reduction = options
    lead = logical_rank(x, bdims[0]) - 1
    x = _fold_into_samples(x, bdims[0], level.batch_size, lead)
    listed = logical_rank(target, bdims[1]) > 0
    target = expand_to_front(target, bdims[1], level.batch_size).flatten()
    weight, factor = _sample_weights(weight, (*bdims, *[None] * 5)[4], target)
    out = op(x, target, p, margin, weight, NONE) * factor
    return reduced(out.unflatten(0, (level.batch_size, -1)) if listed else out, 0, reduction)


def _sample_weights(weight: Any, bdim: int | None, target: Tensor) -> tuple[Any, Any]:
    """Turn batched class weights into a factor of each sample's loss."""
    if bdim is None:
        return weight, 1
    weight = batch_to_front(weight, bdim)
    return None, weight.gather(1, target.view(weight.shape[0], -1)).flatten()


@row("aten::multi_margin_loss_backward")
def multi_margin_loss_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch as in the forward pass."""
    options = [*args, *(None, MEAN)[len(args) - 5 :]]
    grad, x, target, p, margin, weight, reduction = options
    size = level.batch_size
    whole = expand_to_front(x, bdims[1], size)
    x = _fold_into_samples(x, bdims[1], size, whole.dim() - 2)
    target = expand_to_front(target, bdims[2], size).flatten()
    weight, factor = _sample_weights(weight, (*bdims, *[None] * 6)[5], target)
    grads = _sample_grads(grad, bdims[0], whole, reduction) * factor
    return op(grads, x, target, p, margin, weight, NONE).view(whole.shape), 0


def _sample_grads(grad: Tensor, bdim: int | None, x: Tensor, reduction: int) -> Tensor:
    """Return the gradient of each sample of each example of ``x``, as one vector."""
    grad = expand_to_front(grad, bdim, x.shape[0])
    if x.dim() > 2:
        if reduction == MEAN:
            grad = grad / x.shape[1]
        grad = (grad.unsqueeze(1) if grad.dim() == 1 else grad).expand(x.shape[:2]).reshape(-1)
    return grad


@row("aten::multilabel_margin_loss_forward")
@refuse_like_torch
def multilabel_margin_loss_forward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch into the samples."""
    size = level.batch_size
    whole = expand_to_front(args[0], bdims[0], size)
    lead = whole.dim() - 2
    x, target = (
        _fold_into_samples(v, bdim, size, lead) for v, bdim in zip(args[:2], bdims[:2], strict=True)
    )
    out, is_target = op(x, target, NONE)
    out = reduced(out.view(whole.shape[:2]) if lead > 0 else out, 0, args[2])[0]
    return (out, is_target.view(whole.shape)), 0


@row("aten::multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch into the samples."""
    grad, x, target, reduction, is_target = args
    size = level.batch_size
    whole = expand_to_front(x, bdims[1], size)
    lead = whole.dim() - 2
    pairs = ((x, bdims[1]), (target, bdims[2]), (is_target, bdims[4]))
    x, target, is_target = (_fold_into_samples(v, d, size, lead) for v, d in pairs)
    out = op(_sample_grads(grad, bdims[0], whole, reduction), x, target, NONE, is_target)
    return out.view(whole.shape), 0


# --- the CTC loss: the batch is folded into the sequences


def _sequences(level: RuleLevel, x: Tensor, bdim: int | None, dim: int) -> Tensor:
    """Fold the batch into the dim of sequences."""
    return expand_at(x, bdim, level.batch_size, dim).flatten(dim, dim + 1)


def _lengths(level: RuleLevel, lengths: Any, bdim: int | None) -> Any:
    if isinstance(lengths, Tensor):
        return expand_to_front(lengths, bdim, level.batch_size).reshape(-1)
    return list(lengths) * level.batch_size


@row("aten::_ctc_loss", "aten::_ctc_loss.Tensor")
def ctc_loss(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the loss and the path probabilities for the backward pass."""
    x, targets, *lengths = args[:4]
    lengths = [_lengths(level, n, bdim) for n, bdim in zip(lengths, bdims[2:4], strict=True)]
    if x.dim() - (bdims[0] is not None) == 2:
        return NotImplemented  # a single sequence without a dim of sequences
    out = op(
        _sequences(level, x, bdims[0], 1), _sequences(level, targets, bdims[1], 0),
        *lengths, *args[4:],
    )  # fmt: skip
    return tuple(o.unflatten(0, (level.batch_size, o.shape[0] // level.batch_size)) for o in out), 0


@row("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch as in the forward pass."""
    grad, x, targets, n, m, loss, alpha, *rest = args
    if x.dim() - (bdims[1] is not None) == 2:
        return NotImplemented
    out = op(
        _sequences(level, grad, bdims[0], 0), _sequences(level, x, bdims[1], 1),
        _sequences(level, targets, bdims[2], 0),
        _lengths(level, n, bdims[3]), _lengths(level, m, bdims[4]),
        _sequences(level, loss, bdims[5], 0), _sequences(level, alpha, bdims[6], 0), *rest,
    )  # fmt: skip
    return out.unflatten(1, (level.batch_size, out.shape[1] // level.batch_size)), 1
