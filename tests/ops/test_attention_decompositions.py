"""Decompositions of fused attention: results and gradients agree with the formula.

The operators for accelerators can't run on the CPU. Their decompositions can, so each one is
compared with its operator's schema, and with autograd's gradients of the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tests.ops.harness import normal
from tsfunc.ops.attention_decompositions import BACKWARD, FORWARD

KEYS = {name: BACKWARD[f"{name}_backward"] for name in FORWARD}


def schema_of(name: str) -> Any:
    return getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema


def call(name: str, form: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call a decomposition as the dispatcher does: keyword-only arguments by name."""
    args, kwargs = [], {}
    for argument in schema_of(name).arguments:
        value = given.get(argument.name.rstrip("_"), argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return form(*args, **kwargs)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias", "scaled"])
@pytest.mark.parametrize("name", FORWARD)
def test_against_the_formula(name: str, kind: str, heads: int) -> None:
    query, key, value = normal(2, 4, 5, 3), normal(2, heads, 6, 3), normal(2, heads, 6, 7)
    takes_bias = any(a.name in ("attn_bias", "attn_mask") for a in schema_of(name).arguments)
    bias = normal(2, 1, 5, 6) if kind == "bias" and takes_bias else None
    causal, scale = kind == "causal", 0.3 if kind == "scaled" else None
    shared: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "attn_bias": bias,
        "attn_mask": bias,
        "dropout_p": 0.0,
        "is_causal": causal,
        "scale": scale,
        "compute_log_sumexp": True,
    }
    inputs = [x.clone().requires_grad_() for x in (query, key, value, bias) if x is not None]
    mask = inputs[3] if bias is not None else None
    attend: Any = F.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = attend(*inputs[:3], mask, is_causal=causal, scale=scale, enable_gqa=True)
    got = call(name, FORWARD[name], shared)
    assert len(got) == len(schema_of(name).returns)
    torch.testing.assert_close(got[0], want)

    cotangent = normal(*want.shape)
    needed = {
        "grad_out": cotangent,
        "out": got[0],
        "logsumexp": got[1],
        "grad_input_mask": [True] * 4,
    }
    found = call(f"{name}_backward", KEYS[name], shared | needed)
    assert len(found) == len(schema_of(f"{name}_backward").returns)
    for ours, theirs in zip(found, torch.autograd.grad(want, inputs, cotangent), strict=False):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", FORWARD)
def test_dropout_is_left_to_the_operator(name: str) -> None:
    x = normal(1, 1, 3, 2)
    given: dict[str, Any] = {
        "query": x,
        "key": x,
        "value": x,
        "dropout_p": 0.5,
        "compute_log_sumexp": True,
    }
    given |= {"is_causal": False, "grad_out": x, "grad_input_mask": [True] * 4}
    assert call(name, FORWARD[name], given) is NotImplemented
    assert call(f"{name}_backward", KEYS[name], given) is NotImplemented


def test_queries_that_see_no_key() -> None:
    """Results, gradients and tangents are zeros, as from the fused operator."""
    x, mask = normal(1, 2, 4, 3), torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False

    def attended(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), mask)

    value, tangent = tsfunc.jvp(attended, (x,), (x.cos(),))
    torch.testing.assert_close(value, attended(x))
    assert not value[:, :, 1].any() and not tangent[:, :, 1].any() and tangent.isfinite().all()
    second = tsfunc.hessian(lambda x: attended(x).pow(3).sum())(x)
    assert second.isfinite().all() and second.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = normal(1, 2, 4, 8)

    def attended(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x.sin(), x.cos())

    value, tangent = tsfunc.jvp(attended, (x.to(dtype),), (x.cos().to(dtype),))
    exact, exact_tangent = tsfunc.jvp(attended, (x,), (x.cos(),))
    assert value.dtype == tangent.dtype == dtype
    torch.testing.assert_close(value.double(), exact, rtol=0.05, atol=0.02)
    torch.testing.assert_close(tangent.double(), exact_tangent, rtol=0.05, atol=0.05)


def test_a_transformer_layer_by_forward_mode() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x, along = normal(4, 3, 8), normal(4, 3, 8).sin()
    tangent = tsfunc.jvp(layer, (x,), (along,))[1]
    step = 1e-6
    around = (layer(x + step * along) - layer(x - step * along)) / (2 * step)
    torch.testing.assert_close(tangent, around, rtol=1e-5, atol=1e-6)
    program = tsfunc.specialize(lambda x, t: tsfunc.jvp(layer, (x,), (t,))[1])
    torch.testing.assert_close(program(x, along), tangent)
    each = tsfunc.vmap(tsfunc.jacfwd(lambda x: layer(x[None])[0]))(x)
    back = tsfunc.vmap(tsfunc.jacrev(lambda x: layer(x[None])[0]))(x)
    torch.testing.assert_close(each, back)


def attended(query: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query * 2, query.cos(), attn_mask=mask, scale=0.4)


def written_out(query: Tensor, mask: Tensor) -> Tensor:
    return (query @ (query * 2).mT * 0.4 + mask).softmax(-1) @ query.cos()


def by_query(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda query, mask: tsfunc.vjp(lambda q: f(q, mask), query)[1](query.sin())[0]


MASKED: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "vmap of vjp": lambda f: tsfunc.vmap(by_query(f)),
    "program of vjp": lambda f: tsfunc.specialize(by_query(f)),
    "program of vmap of vjp": lambda f: tsfunc.specialize(tsfunc.vmap(by_query(f))),
    "program of vjp of cond": lambda f: tsfunc.specialize(
        by_query(lambda q, m: tsfunc.cond(q.sum() < 1e9, f, lambda q, m: q * 2, q, m))
    ),
    "program of a loop": lambda f: tsfunc.specialize(
        by_query(lambda q, m: tsfunc.fori_loop(0, 2, lambda i, q: f(q, m), q))
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_derivatives_by_a_mask_that_no_transform_differentiates_by(name: str) -> None:
    """No tracer requires grad, so torch chooses an operator without a derivative by the mask."""
    sizes = (3, 1, 2) if "vmap" in name else (1, 2)
    query = torch.randn(*sizes, 4, 2, dtype=torch.float64)
    mask = torch.randn(*sizes, 4, 4, dtype=torch.float64)
    ours, theirs = MASKED[name](attended), MASKED[name](written_out)
    ours(query, mask)  # a program is traced without gradients
    for both in (False, True):
        leaves = [query.clone().requires_grad_(both), mask.clone().requires_grad_()]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        got, want = (torch.autograd.grad(f(*leaves).sin().sum(), wanted) for f in (ours, theirs))
        torch.testing.assert_close(got, want)
