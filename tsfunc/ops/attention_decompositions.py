"""Fused attention in other operators, which have derivatives of any order.

torch gives the fused operators one derivative by reverse mode, no tangents, and backward operators
without derivatives. The forms here compute the weights as ``softmax`` does, so they need memory for
all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.catalogue.signature import OperatorSignature
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


def signature_of(name: str) -> OperatorSignature:
    """Return the signature of a fused operator."""
    signature = reader().signature(name)
    assert signature is not None
    return signature


def _attention(given: Mapping[str, Any]) -> _Attention:
    """Return the attention of a call, from its arguments by name."""
    bias = given.get("attn_bias", given.get("attn_mask"))
    if bias is not None and tuple(bias.shape) == (0,):  # the backward operator of cuDNN has no None
        bias = None
    inputs = given["query"], given["key"], given["value"]
    return _Attention(*inputs, bias, given.get("is_causal", False), given.get("scale"))


def _forward(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the results of an operator. Only the fused backward reads those after the first."""
    signature = signature_of(name)
    given = {argument.name: value for argument, value in signature.bind(args, kwargs)}
    if given.get("dropout_p"):
        return NotImplemented
    query, key = given["query"], given["key"]
    results = [_attention(given).result()]
    results.append(query.new_zeros(query.shape[:-1], dtype=in_accumulation_dtype(query).dtype))
    lengths = iter((query.shape[-2], key.shape[-2]))
    return *results, *(
        next(lengths) if kind == "int" else query.new_zeros((), dtype=torch.int64)
        for kind in signature.returns[2:]
    )


def _backward(name: str, grad: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the results of a backward operator."""
    bound = signature_of(name).bind((grad, *args), kwargs)
    given = {argument.name: value for argument, value in bound}
    if given["dropout_p"]:
        return NotImplemented
    *gradients, scores = _attention(given).pullback(grad)
    if "grad_input_mask" not in given:
        return tuple(gradients)
    mask, bias = given["grad_input_mask"], given["attn_bias"]
    by_bias = None
    if bias is not None and mask[3]:
        by_bias = scores.sum_to_size(bias.shape).to(bias.dtype)
    return *(x if wanted else None for x, wanted in zip(gradients, mask, strict=False)), by_bias


_PREFIX = "aten::_scaled_dot_product_"
_KERNELS = ("flash_attention_for_cpu", "efficient_attention", "flash_attention", "cudnn_attention")
FORWARD: dict[str, Callable[..., Any]] = {
    name: functools.partial(_forward, name) for name in (_PREFIX + kernel for kernel in _KERNELS)
}
BACKWARD: dict[str, Callable[..., Any]] = {
    f"{name}_backward": functools.partial(_backward, f"{name}_backward") for name in FORWARD
}
# Those whose mask torch takes for a constant.
MASKED: dict[str, Callable[..., Any]] = {
    name: FORWARD[name]
    for name in (f"{_PREFIX}flash_attention_for_cpu", f"{_PREFIX}cudnn_attention")
}
