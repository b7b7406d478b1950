"""Attention kernels, and torch's attention layers under vmap, against the loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import tsfunc
from tests.ops.harness import Level, check, compare, normal
from tsfunc.ops.registry import find

aten = torch.ops.aten


@pytest.mark.parametrize("lead", [(), (2,), (4, 2)])
def test_attention_equals_the_loop(lead: tuple[int, ...]) -> None:
    q, k, v = normal(*lead, 5, 4), normal(*lead, 6, 4), normal(*lead, 6, 7)
    op = aten.scaled_dot_product_attention.default
    assert check(op, q, k, v)
    assert check(op, q, k, v, scale=0.3)
    assert check(op, q, q * 2, v[..., :5, :], None, 0.0, True)
    choices = [(0,), (3,), (0, 1, 2, 3), (1, 3), (0, 1, 2)]
    assert check(op, q, k, v, normal(5, 6), choices=choices)
    assert check(op, q, k, v, normal(5, 6) > 0, choices=choices)
    if lead:
        assert check(op, q, k, v, normal(*lead, 5, 6), choices=choices)
        assert check(op, q, k, v, normal(1, 5, 6), choices=choices)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [None, (5, 5), (4, 1, 5, 5), (1, 1, 5, 5)])
def test_flash_kernel_of_the_cpu(causal: bool, shape: tuple[int, ...] | None) -> None:
    q, k, v = normal(4, 2, 5, 8), normal(4, 2, 5, 8) * 2, normal(4, 2, 5, 8) * 3
    kwargs: dict[str, Any] = {} if shape is None or causal else {"attn_mask": normal(*shape)}
    op = aten._scaled_dot_product_flash_attention_for_cpu
    assert check(op.default, q, k, v, 0.0, causal, **kwargs)
    out, sums = op(q, k, v, 0.0, causal, **kwargs)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    choices = [(0,), (1,), (0, 1, 2, 3, 4, 5), (2, 3)]
    args = (normal(*out.shape), q, k, v, out, sums, 0.0, causal)
    assert check(backward, *args, choices=choices, **kwargs)


@pytest.mark.parametrize("shape", [(5, 5), (4, 1, 5, 5), (1, 2, 5, 5)])
@pytest.mark.parametrize("queries", [None, 0])
def test_masks_of_each_example(shape: tuple[int, ...], queries: int | None) -> None:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, k, v = normal(3, 4, 2, 5, 8), normal(4, 2, 5, 8), normal(4, 2, 5, 8) * 3
    q = q if queries == 0 else q[0]
    masks = normal(3, *shape).movedim(0, -1).contiguous()
    dims = [queries, None, None, None, None, {"attn_mask": len(shape)}]
    forward, backward = find(op.name()), find(back.name())
    assert forward is not None and forward.rule is not None
    assert backward is not None and backward.rule is not None
    outs, out_dims = forward.rule(op, Level(), dims, [q, k, v, 0.0, False], {"attn_mask": masks})
    grad = normal(4, 2, 5, 8)
    dims = [None, queries, None, None, 0, 0, None, None, {"attn_mask": len(shape)}]
    args = [grad, q, k, v, *outs, 0.0, False]
    grads, grad_dims = backward.rule(back, Level(), dims, args, {"attn_mask": masks})
    expected, expected_grads = [], []
    for i in range(3):
        one, mask = (q[i] if queries == 0 else q), masks[..., i]
        expected.append(op(one, k, v, 0.0, False, attn_mask=mask))
        expected_grads.append(back(grad, one, k, v, *expected[-1], 0.0, False, attn_mask=mask))
    compare(outs, out_dims, expected, "forward")
    compare(grads, grad_dims, expected_grads, "backward")


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("batched", [(0, 0), (0, None), (None, 0), (-1, 1)])
def test_masked_softmax(kind: int, batched: tuple[int | None, int | None]) -> None:
    """All kinds of masks of the fused attention kernel agree with the loop."""
    x = torch.randn(3, 2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    shape = {0: (4, 4), 1: (2, 4), 2: (2, 2, 4, 4)}[kind]
    mask = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1)) > 0.6
    args, loops = [], []
    for value, bdim in zip((x, mask), batched, strict=True):
        args.append(value[0] if bdim is None else value.movedim(0, bdim))
        loops.append([value[0]] * 3 if bdim is None else list(value))

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch._masked_softmax(x, mask, 3, kind)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = tsfunc.vmap(f, batched)(*args)
    want = torch.stack([f(a, m) for a, m in zip(*loops, strict=True)])
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [((4, 4), 2, torch.bool), ((4,), 0, torch.bool), ((4,), 1, torch.bool), ((2, 4, 4), 2, float)],
)
@pytest.mark.parametrize("batched", [(0, 0), (0, None), (None, -1)])
def test_masked_softmax_refuses_masks_as_torch_does(
    batched: tuple[int | None, int | None], shape: tuple[int, ...], kind: int, dtype: Any
) -> None:
    x, mask = torch.randn(2, 4, 4), torch.ones(shape, dtype=dtype)

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch._masked_softmax(x, mask, 2, kind)

    with pytest.raises(RuntimeError) as one:
        f(x, mask)
    args = [
        value if bdim is None else torch.stack([value] * 3, bdim)
        for value, bdim in zip((x, mask), batched, strict=True)
    ]
    with pytest.raises(RuntimeError) as all_of_them:
        tsfunc.vmap(f, batched)(*args)
    assert str(all_of_them.value).startswith(str(one.value).partition("\n")[0])


def test_gradients_of_masked_softmax() -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    mask = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(1)) > 0.6

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch._masked_softmax(x, mask, 1, 2).square().sum()

    got = tsfunc.vmap(tsfunc.grad(f))(x, mask)
    want = [torch.func.grad(f)(a, m) for a, m in zip(x, mask, strict=True)]
    torch.testing.assert_close(got, torch.stack(want), equal_nan=True)
