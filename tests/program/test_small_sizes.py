"""Calls with named dims of size 0 and 1: NOTE [sizes 0 and 1] in ``program/graphs/comparison``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta

SIZES = (3, 1, 0)


def rotated(x: Tensor) -> Tensor:
    """Rotary embeddings, whose angles depend on a size alone."""
    angles = torch.outer(torch.arange(x.shape[1]).float(), torch.arange(4).float() / 4)
    one, other = x[..., 0::2], x[..., 1::2]
    turned = [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()]
    return torch.stack(turned, -1).flatten(-2)


def attended(x: Tensor) -> Tensor:
    """A causal mask, which is folded if its size is fixed."""
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return (x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x


def checked(x: Tensor) -> Tensor:
    assert x.shape[1] <= 64
    return x.cumsum(1) * x.shape[0]


@pytest.mark.parametrize("f", [rotated, attended, checked])
def test_one_program_for_every_combination(f: Callable[[Tensor], Tensor]) -> None:
    g = specialize(f, {"x": Meta(["b", "t", 8])})
    for b, t in product(SIZES, SIZES):
        x = torch.randn(b, t, 8)
        torch.testing.assert_close(g(x), f(x))
    assert g.cache_info().programs == 1


def test_one_program_whichever_size_comes_first() -> None:
    for first in ((1, 1), (0, 3), (3, 1)):
        g = specialize(rotated, {"x": Meta(["b", "t", 8])})
        for b, t in (first, (2, 5)):
            x = torch.randn(b, t, 8)
            torch.testing.assert_close(g(x), rotated(x))
        assert g.cache_info().programs == 1
        assert str(g.descriptors["x"].shape) == "('b', 't', 8)"


def test_one_program_for_multiples() -> None:
    def patches(x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1] // 4, 4).sum(-1)

    g = specialize(patches, {"x": Meta(["b", Dim("t", multiple_of=4)])})
    for b, t in product(SIZES, (8, 4, 0)):
        x = torch.randn(b, t)
        torch.testing.assert_close(g(x), patches(x))
    assert g.cache_info().programs == 1


def test_one_program_for_any_number() -> None:
    def scaled(x: Tensor, k: int, rate: float) -> Tensor:
        return x.sum(1) * rate + max(k, 0) * rate

    g = specialize(scaled, {"x": Meta(["b", "t"]), "k": int, "rate": float})
    for k, (b, t) in enumerate([(3, 4), (3, 1), (1, 4), (0, 1), (5, 5)]):
        x = torch.randn(b, t)
        torch.testing.assert_close(g(x, k + 1, 0.5 / (k + 1)), scaled(x, k + 1, 0.5 / (k + 1)))
    assert g.cache_info().programs == 1
    reasons = [entry.reason for entry in g.cache_info().entries]
    assert sorted(reasons) == ["b is 0; t is 1", "b is 1", "t is 1", "the first call"]


def squeezed(x: Tensor, y: Tensor) -> Tensor:
    return x.squeeze(0) + y.squeeze(1).sum()


def told_apart(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x + y.sum()


def broadcast(x: Tensor, y: Tensor) -> Tensor:
    return F.pad(x, (1, 0)) - y.mean()


def masked(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros(x.shape[0])
    kept[:1] = 1  # a written tensor is not a constant
    return kept[:, None] * x + y.sum()


@pytest.mark.parametrize("f", [squeezed, told_apart, broadcast, masked])
def test_a_function_of_separate_examples_is_correct(f: Callable[..., Any]) -> None:
    g = specialize(f, {"x": Meta([Dim("b", one_of=SIZES), "t"]), "y": Meta(["t", "b"])})
    for b, t in product(SIZES, SIZES):
        x, y = torch.randn(b, t), torch.randn(t, b)
        torch.testing.assert_close(g(x, y), f(x, y), equal_nan=True)
