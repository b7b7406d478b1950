"""The CTC loss: the batch is folded into the sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tsfunc.ops.dims import expand_at, expand_to_front
from tsfunc.ops.registry import Dims, RuleLevel, row


def _sequences(level: RuleLevel, x: Tensor, at: int | None, dim: int) -> Tensor:
    """Fold the batch into the dim of sequences."""
    return expand_at(x, at, level.batch_size, dim).flatten(dim, dim + 1)


def _lengths(level: RuleLevel, lengths: Any, at: int | None) -> Any:
    if isinstance(lengths, Tensor):
        return expand_to_front(lengths, at, level.batch_size).reshape(-1)
    return list(lengths) * level.batch_size


@row("aten::_ctc_loss", "aten::_ctc_loss.Tensor")
def ctc_loss(
    op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the loss and the path probabilities for the backward pass."""
    x, targets, *lengths = args[:4]
    lengths = [_lengths(level, n, d) for n, d in zip(lengths, dims[2:4], strict=True)]
    if x.dim() - (dims[0] is not None) == 2:
        return NotImplemented  # a single sequence without a dim of sequences
    out = op(
        _sequences(level, x, dims[0], 1), _sequences(level, targets, dims[1], 0),
        *lengths, *args[4:],
    )  # fmt: skip
    return tuple(o.unflatten(0, (level.batch_size, o.shape[0] // level.batch_size)) for o in out), 0


@row("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Fold the batch as in the forward pass."""
    grad, x, targets, n, m, loss, alpha, *rest = args
    if x.dim() - (dims[1] is not None) == 2:
        return NotImplemented
    out = op(
        _sequences(level, grad, dims[0], 0), _sequences(level, x, dims[1], 1),
        _sequences(level, targets, dims[2], 0),
        _lengths(level, n, dims[3]), _lengths(level, m, dims[4]),
        _sequences(level, loss, dims[5], 0), _sequences(level, alpha, dims[6], 0), *rest,
    )  # fmt: skip
    return out.unflatten(1, (level.batch_size, out.shape[1] // level.batch_size)), 1
