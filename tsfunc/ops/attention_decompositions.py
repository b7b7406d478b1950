"""Fused attention in other operators, which have derivatives of any order.

torch gives the fused operators one derivative by reverse mode, no tangents, and backward operators
without derivatives. The forms here compute the weights as ``softmax`` does, so they need memory for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import in_accumulation_dtype


class _Attention:
    """One call, with tensors of the shape (samples, heads, length, features).

    Attributes:
        query: the queries, in the dtype of the computation, as are the keys and values.
        key: the keys, with a head for each head of the queries; so are the values.
        weights: the weight of each key for each query. Queries that see no key have zeros.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> None:
        self.inputs = query, key, value
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.query, self.key, self.value = (
            in_accumulation_dtype(query),
            self._repeat_heads(key),
            self._repeat_heads(value),
        )
        scores = self.query @ self.key.mT * self.scale
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        if bias is not None and bias.dtype == torch.bool:
            scores = scores.masked_fill(~bias, float("-inf"))
        elif bias is not None:
            scores = scores + bias
        blind = (scores == float("-inf")).all(-1, keepdim=True)
        self.weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """Return a head of keys or values for each head of queries, of which several share one."""
        shared = self.inputs[0].shape[-3] // x.shape[-3]
        return in_accumulation_dtype(x if shared == 1 else x.repeat_interleave(shared, -3))

    def result(self) -> Tensor:
        return (self.weights @ self.value).to(self.inputs[0].dtype)

    def pullback(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients by the queries, keys, values and scores."""
        grad = in_accumulation_dtype(grad)
        by_weights = grad @ self.value.mT
        scores = self.weights * (by_weights - (self.weights * by_weights).sum(-1, keepdim=True))
        gradients = scores @ self.key, scores.mT @ self.query, self.weights.mT @ grad
        scales = self.scale, self.scale, 1.0
        by_query, by_key, by_value = (
            _in_order_of_fused(_summed_to(x * scale, of.shape[-3]).to(of.dtype))
            for x, scale, of in zip(gradients, scales, self.inputs, strict=True)
        )
        return by_query, by_key, by_value, scores


def _in_order_of_fused(x: Tensor) -> Tensor:
    """Return a gradient with the heads within the sequence, as torch's operators lay it out.

    A program views the result as its trace did, which has the operator's layout.
    """
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _summed_to(x: Tensor, heads: int) -> Tensor:
    """Sum over the heads of queries that share a head of keys and values."""
    if x.shape[-3] == heads:
        return x
    grouped: Tensor = x.unflatten(-3, (heads, x.shape[-3] // heads))
    return grouped.sum(-3)


def _no_sums(query: Tensor) -> Tensor:
    """Return a placeholder of the log-sum-exp, which only a fused backward operator reads."""
    return query.new_zeros(query.shape[:-1], dtype=in_accumulation_dtype(query).dtype)


def _state(query: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return placeholders of the random state and of the debugging results."""
    return tuple(query.new_zeros((), dtype=torch.int64) for _ in range(count))


def for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``."""
    if dropout:
        return NotImplemented
    out = _Attention(query, key, value, attn_mask, causal, scale).result()
    return out, _no_sums(query)


def for_cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_flash_attention_for_cpu_backward``."""
    if dropout:
        return NotImplemented
    return _Attention(query, key, value, attn_mask, causal, scale).pullback(grad)[:3]


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_efficient_attention``."""
    if dropout:
        return NotImplemented
    out = _Attention(query, key, value, bias, causal, scale).result()
    return out, _no_sums(query), *_state(query, 2)


def efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    mask: Sequence[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_efficient_attention_backward``."""
    if dropout:
        return NotImplemented
    *gradients, scores = _Attention(query, key, value, bias, causal, scale).pullback(grad)
    by_bias = None
    if bias is not None and mask[3]:
        by_bias = scores.sum_to_size(bias.shape).to(bias.dtype)
    return *(
        x if needs_grad else None for x, needs_grad in zip(gradients, mask, strict=False)
    ), by_bias


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_flash_attention``."""
    return cudnn(query, key, value, None, True, dropout, causal, debug, scale=scale)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    query_sums: Tensor,
    key_sums: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    return for_cpu_backward(grad, query, key, value, out, sums, dropout, causal, scale=scale)


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_cudnn_attention``."""
    if dropout:
        return NotImplemented
    out = _Attention(query, key, value, bias, causal, scale).result()
    lengths = query.shape[-2], key.shape[-2]
    return out, _no_sums(query), *_state(query, 2), *lengths, *_state(query, 3)


def cudnn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    query_sums: Tensor,
    key_sums: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_cudnn_attention_backward``."""
    bias = None if bias is None or not bias.numel() else bias
    return for_cpu_backward(
        grad, query, key, value, out, sums, dropout, causal, attn_mask=bias, scale=scale
    )


FORWARD: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": for_cpu,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
}
# Those whose mask torch takes for a constant.
MASKED: dict[str, Callable[..., Any]] = {
    name: FORWARD[name]
    for name in (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_cudnn_attention",
    )
}
BACKWARD: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": for_cpu_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
