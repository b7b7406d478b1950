"""Attention kernels, and torch's attention layers under vmap, against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsfunc.ops  # noqa: F401  (declares rows)
from tests.ops.harness import check

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=seeded)


@pytest.mark.parametrize("lead", [(), (2,), (4, 2)])
def test_whole(lead: tuple[int, ...]) -> None:
    q, k, v = rand(*lead, 5, 4), rand(*lead, 6, 4), rand(*lead, 6, 7)
    op = aten.scaled_dot_product_attention.default
    assert check(op, q, k, v)
    assert check(op, q, k, v, scale=0.3)
    assert check(op, q, q * 2, v[..., :5, :], None, 0.0, True)
    choices = [(0,), (3,), (0, 1, 2, 3), (1, 3), (0, 1, 2)]
    assert check(op, q, k, v, rand(5, 6), choices=choices)
    assert check(op, q, k, v, rand(5, 6) > 0, choices=choices)
    if lead:
        assert check(op, q, k, v, rand(*lead, 5, 6), choices=choices)
        assert check(op, q, k, v, rand(1, 5, 6), choices=choices)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [None, (5, 5), (4, 1, 5, 5), (1, 1, 5, 5)])
def test_flash_kernel_of_the_cpu(causal: bool, shape: tuple[int, ...] | None) -> None:
    q, k, v = rand(4, 2, 5, 8), rand(4, 2, 5, 8) * 2, rand(4, 2, 5, 8) * 3
    kwargs: dict[str, Any] = {} if shape is None or causal else {"attn_mask": rand(*shape)}
    op = aten._scaled_dot_product_flash_attention_for_cpu
    assert check(op.default, q, k, v, 0.0, causal, **kwargs)
    out, sums = op(q, k, v, 0.0, causal, **kwargs)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    choices = [(0,), (1,), (0, 1, 2, 3, 4, 5), (2, 3)]
    args = (rand(*out.shape), q, k, v, out, sums, 0.0, causal)
    assert check(backward, *args, choices=choices, **kwargs)
