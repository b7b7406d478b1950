"""Distances between rows against the loop."""

from __future__ import annotations

import pytest
import torch

import tsfunc
from tests.ops.harness import check, uniform

aten = torch.ops.aten


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("shapes", [((4, 3), (5, 3)), ((2, 4, 3), (2, 5, 3)), ((4, 3), (2, 5, 3))])
def test_cdist(p: float, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, y = uniform(*shapes[0]), uniform(*shapes[1])
    assert check(aten._cdist_forward.default, x, y, p, 2)
    assert check(aten.cdist.default, x, y, p)
    distances = torch.cdist(x, y, p)
    if x.dim() == y.dim():
        args = (uniform(*distances.shape), x, y, p, distances)
        assert check(aten._cdist_backward.default, *args, choices=[(0,), (1,), (0, 1, 2, 3)])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("leads", [((2,), (1,)), ((1,), (2,)), ((), (2,)), ((2, 1), (1, 3))])
def test_cotangents_of_broadcast_distances(p: float, leads: tuple[tuple[int, ...], ...]) -> None:
    x, y = (uniform(*lead, n, 2).requires_grad_() for lead, n in zip(leads, (3, 4), strict=True))
    distances = torch.cdist(x, y, p, "donot_use_mm_for_euclid_dist")

    def pulled(cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(distances, (x, y), cotangent, retain_graph=True)

    cotangents = uniform(2, *distances.shape)
    want = [torch.stack(grads) for grads in zip(*map(pulled, cotangents), strict=True)]
    for got, expected in zip(tsfunc.vmap(pulled)(cotangents), want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_pdist(p: float) -> None:
    x = uniform(5, 3)
    assert check(aten._pdist_forward.default, x, p)
    distances = torch.pdist(x, p)
    args = (uniform(*distances.shape), x, p, distances)
    assert check(aten._pdist_backward.default, *args, choices=[(0,), (0, 1, 2)])


def test_euclidean_dist() -> None:
    assert check(aten._euclidean_dist.default, uniform(2, 4, 3), uniform(2, 5, 3))
