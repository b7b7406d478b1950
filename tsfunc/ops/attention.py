"""Scaled dot-product attention: the batch is folded into the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    batch_to_front,
    batches_first,
    expand_to_front,
    logical_rank,
    unit_dims,
    with_defaults,
    wrap_dim,
)
from tsfunc.ops.keywords import keyword_bdim, takes_keywords
from tsfunc.ops.random import check_randomness
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def _samples(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Return (samples, heads, ...) for a logical shape of (N, heads, ...)."""
    return expand_to_front(x, bdim, size).flatten(0, 1)


def _split_heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (size, x.shape[0] // size))


def _mask(mask: Tensor | None, bdim: int | None, size: int, n: Any, rank: int) -> Tensor | None:
    """Return a mask in the form of the folded samples, for ``rank`` logical dims.

    With four logical dims the first one is N.
    """
    if mask is None:
        return None
    if bdim is None:
        if mask.dim() == 3:
            mask = mask.unsqueeze(0)
        if mask.dim() < 4 or mask.shape[0] == 1:
            return mask
        return mask.expand(size, n, *mask.shape[1:]).flatten(0, 1)
    mask = batch_to_front(mask, bdim)
    if rank < 4:
        return unit_dims(mask, 1, 4 - mask.dim())
    mask = unit_dims(mask, 1, 5 - mask.dim())
    return mask.expand(size, n, *mask.shape[2:]).flatten(0, 1)


def _refuse_dropout(op: Any, level: RuleLevel, p: float) -> None:
    """Raise unless randomness is "different": fused kernels draw separately for each sample."""
    if p:
        check_randomness(op, level, {})
        if level.randomness != "different":
            raise RuntimeError(
                f"vmap: {op.name()} draws by itself, once for the whole batch, so it can't drop "
                f"values as randomness={level.randomness!r} asks for. Use "
                f"randomness='different', or torch.nn.attention.SDPBackend.MATH."
            )


@row("aten::scaled_dot_product_attention")
def attention(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call the whole operator for ranks that fused kernels support; other calls are decomposed."""
    options = [*args[3:], *(None, 0.0, False)[len(args) - 3 :]]
    mask, dropout, causal = options
    m = bdims[3] if len(bdims) > 3 else None
    ranks = [logical_rank(x, bdim) for x, bdim in zip(args[:3], bdims[:3], strict=True)]
    rank, size = ranks[0], level.batch_size
    if dropout or not 2 <= rank <= 4 or ranks != [rank] * 3:
        return NotImplemented
    if mask is not None and logical_rank(mask, m) > rank:
        return NotImplemented
    q, k, v = batches_first(args[:3], bdims[:3], size)
    if rank == 2:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    n = q.shape[1]
    if rank == 4:
        if k.shape[1] != n or v.shape[1] != n:
            return NotImplemented
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = op(q, k, v, _mask(mask, m, size, n, rank), 0.0, causal, **kwargs)
    if rank == 4:
        return out.unflatten(0, (size, n)), 0
    return (out.squeeze(1) if rank == 2 else out), 0


def _sample_count(x: Tensor, bdim: int | None) -> Any:
    return x.shape[1 if bdim == 0 else 0]


def _with_mask(
    level: RuleLevel, kwargs: Kwargs, bdims: BatchDims, args: Args, n: Any
) -> dict[str, Any]:
    bdim = keyword_bdim(bdims, args, "attn_mask")
    mask = _mask(kwargs.get("attn_mask"), bdim, level.batch_size, n, 4)
    return {**kwargs, "attn_mask": mask}


@row("aten::_scaled_dot_product_flash_attention_for_cpu")
def flash_cpu(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the result and the log-sum-exp for the backward pass."""
    _refuse_dropout(op, level, args[3] if len(args) > 3 else 0.0)
    size = level.batch_size
    n = _sample_count(args[0], bdims[0])
    tensors = [_samples(x, bdim, size) for x, bdim in zip(args[:3], bdims[:3], strict=True)]
    out = op(*tensors, *args[3:], **_with_mask(level, kwargs, bdims, args, n))
    return tuple(_split_heads(o, size) for o in out), 0


@row("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_cpu_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch as in the forward pass."""
    size = level.batch_size
    n = _sample_count(args[1], bdims[1])
    tensors = [_samples(x, bdim, size) for x, bdim in zip(args[:6], bdims[:6], strict=True)]
    out = op(*tensors, *args[6:], **_with_mask(level, kwargs, bdims, args, n))
    return tuple(_split_heads(o, size) for o in out), 0


takes_keywords(
    [
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    "attn_mask",
)


def _bias(x: Tensor | None, bdim: int | None, size: int) -> Tensor | None:
    return None if x is None else _samples(x, bdim, size)


@row("aten::_scaled_dot_product_efficient_attention")
def efficient(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The third and fourth results are the random state, which all samples share."""
    _refuse_dropout(op, level, args[5] if len(args) > 5 else 0.0)
    size = level.batch_size
    tensors = [_bias(x, bdim, size) for x, bdim in zip(args[:4], bdims[:4], strict=True)]
    out, sums, *state = op(*tensors, *args[4:], **kwargs)
    return (_split_heads(out, size), _split_heads(sums, size), *state), (0, 0, None, None)


@row("aten::_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch as in the forward pass."""
    size = level.batch_size
    tensors = [_bias(x, bdim, size) for x, bdim in zip(args[:7], bdims[:7], strict=True)]
    out = op(*tensors, *args[7:], **kwargs)
    return tuple(o if o is None or o.dim() < 4 else _split_heads(o, size) for o in out), tuple(
        None if o is None or o.dim() < 4 else 0 for o in out
    )


@row(
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention",
)  # fmt: skip
def flash(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Run the flash or cuDNN kernel on the merged batch; cuDNN's has a bias and one more flag."""
    count = 3 if "flash" in op.name() else 4
    position = 3 if count == 3 else 5
    _refuse_dropout(op, level, args[position] if len(args) > position else 0.0)
    size = level.batch_size
    tensors = [_bias(x, bdim, size) for x, bdim in zip(args[:count], bdims[:count], strict=True)]
    out, sums, *state = op(*tensors, *args[count:], **kwargs)
    return (_split_heads(out, size), _split_heads(sums, size), *state), (0, 0, *[None] * len(state))


@row(
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)
def flash_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The cuDNN form has a bias after the random state."""
    size = level.batch_size
    folded = list(args)
    positions = [*range(6)] if "flash" in op.name() else [*range(6), 8]
    for i in positions:
        folded[i] = _bias(args[i], bdims[i], size)
    out = op(*folded, **kwargs)
    return tuple(_split_heads(o, size) for o in out), 0


SOURCE_MASK, PADDING_MASK, FULL_MASK = 0, 1, 2  # kinds of masks of ``_masked_softmax``


@row("aten::_masked_softmax")
def masked_softmax(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Expand the two shorter kinds of masks to one value per element."""
    x, mask, dim, kind = with_defaults(args[:4], None, None, None, FULL_MASK)
    rank = logical_rank(x, bdims[0])
    fits = 2 if kind in (SOURCE_MASK, PADDING_MASK) else rank
    if logical_rank(mask, bdims[1]) != fits or mask.dtype is not torch.bool:
        return raise_as_one_example(op, bdims, args, kwargs)
    x = expand_to_front(x, bdims[0], level.batch_size)
    mask = expand_to_front(mask, bdims[1], level.batch_size)
    if kind == SOURCE_MASK:  # one value per pair of positions
        mask = unit_dims(mask, 1, rank - 2)
    elif kind == PADDING_MASK:  # one value per sequence and position
        mask = unit_dims(mask, 2, rank - 2)
    if rank == 0:  # a scalar is a row of one element
        return op(x.unsqueeze(1), mask.unsqueeze(1), 1, FULL_MASK).squeeze(1), 0
    last = rank - 1 if dim is None else wrap_dim(dim, rank)
    return op(x, mask.expand(x.shape), last + 1, FULL_MASK), 0


@row("aten::_masked_softmax_backward")
def masked_softmax_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The mask has one value per element; torch returns a row of one element for a scalar."""
    size, rank = level.batch_size, logical_rank(args[0], bdims[0])
    grad, out, mask = batches_first(args[:3], bdims[:3], size)
    if rank == 0:
        return op(grad.unsqueeze(1), out.unsqueeze(1), mask.unsqueeze(1), 1), 0
    dim = args[3] if len(args) > 3 else None
    mask = mask.expand(out.shape)
    return op(grad, out, mask, (rank - 1 if dim is None else wrap_dim(dim, rank)) + 1), 0
