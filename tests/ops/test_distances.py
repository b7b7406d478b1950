"""Distances between rows against the loop."""

from __future__ import annotations

import pytest
import torch

import tsfunc.ops  # noqa: F401  (declares rows)
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
def test_pdist(p: float) -> None:
    x = uniform(5, 3)
    assert check(aten._pdist_forward.default, x, p)
    distances = torch.pdist(x, p)
    args = (uniform(*distances.shape), x, p, distances)
    assert check(aten._pdist_backward.default, *args, choices=[(0,), (0, 1, 2)])


def test_euclidean_dist() -> None:
    assert check(aten._euclidean_dist.default, uniform(2, 4, 3), uniform(2, 5, 3))
