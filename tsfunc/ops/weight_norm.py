"""Weight normalization: the fused operators take one weight, so a batch is decomposed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tsfunc.ops.dims import batches_first, expand_to_front, with_defaults
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def _except_dim(x: Tensor, dim: int) -> list[int]:
    """Return the physical dims of a weight except the batch dim, which is first, and ``dim``."""
    return [d + 1 for d in range(x.dim() - 1) if d != dim]


@row("aten::_weight_norm_interface")
def weight_norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return a weight with the direction of ``v`` and the length ``g``, and the norms of ``v``."""
    v, g, dim = with_defaults(args, None, None, 0)
    v, g = (
        expand_to_front(v, bdims[0], level.batch_size),
        expand_to_front(g, bdims[1], level.batch_size),
    )
    norms = v.norm(2, _except_dim(v, dim), keepdim=True)
    return (v * (g / norms), norms), 0


@row("aten::_weight_norm_interface_backward")
def weight_norm_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Project out the gradient along ``v``, which does not change the direction."""
    *tensors, dim = args
    grad, v, g, norms = batches_first(tensors, bdims[: len(tensors)], level.batch_size)
    along = (grad * v).sum(_except_dim(v, dim), keepdim=True) / norms
    return (g / norms * (grad - v * along / norms), along), 0
