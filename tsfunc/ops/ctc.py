"""The CTC loss: the batch is folded into the sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tsfunc.ops.dims import expand_at, expand_to_front
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


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
