"""Scaled dot-product attention: the batch is folded into the samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.attention_decompositions import BACKWARD, FORWARD, signature_of
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


_FUSED, _FUSED_BACKWARD = [*FORWARD], [*BACKWARD]
# The arguments with a value for each sample. The samples share the random state.
_OF_SAMPLES = "grad_out grad_out_ query key value out logsumexp attn_bias".split()


@functools.cache
def _positions(name: str) -> tuple[dict[str, int], list[int]]:
    """Return the positions of arguments by name, and of those with a value for each sample."""
    positions = {argument.name: i for i, argument in enumerate(signature_of(name).arguments)}
    return positions, [i for argument, i in positions.items() if argument in _OF_SAMPLES]


def _call_on_samples(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Sequence[Any]:
    """Call a fused operator with the batch folded into the samples."""
    (positions, of_samples), size = _positions(op.name()), level.batch_size
    folded = list(args)
    for i in of_samples:
        if args[i] is not None:
            folded[i] = _samples(args[i], bdims[i], size)
    if "attn_mask" in positions:
        query = positions["query"]
        n = args[query].shape[1 if bdims[query] == 0 else 0]
        bdim = keyword_bdim(bdims, args, "attn_mask")
        kwargs = {**kwargs, "attn_mask": _mask(kwargs.get("attn_mask"), bdim, size, n, 4)}
    return op(*folded, **kwargs)


@row(*_FUSED)
def fused(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Two results have a value for each sample: the output and the log-sum-exp."""
    position = _positions(op.name())[0]["dropout_p"]
    _refuse_dropout(op, level, args[position] if len(args) > position else 0.0)
    out, sums, *state = _call_on_samples(op, level, bdims, args, kwargs)
    size = level.batch_size
    return (_split_heads(out, size), _split_heads(sums, size), *state), (0, 0, *[None] * len(state))


@row(*_FUSED_BACKWARD)
def fused_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Gradients that the caller does not need are None or empty."""
    out = _call_on_samples(op, level, bdims, args, kwargs)
    needed = [x is not None and x.dim() == 4 for x in out]
    pairs = [*zip(out, needed, strict=True)]
    results = [_split_heads(x, level.batch_size) if is_needed else x for x, is_needed in pairs]
    return tuple(results), tuple(0 if is_needed else None for is_needed in needed)


takes_keywords([_FUSED[0], _FUSED_BACKWARD[0]], "attn_mask")


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
