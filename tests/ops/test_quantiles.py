"""Quantiles of batches: as the loop over the examples, with gradients from outside and inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, vmap

X = torch.arange(30.0, dtype=torch.float64).sin().reshape(3, 5, 2)


@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("dim", [None, 0, -1])
@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_quantiles_and_their_gradients(function: Any, dim: int | None, interpolation: str) -> None:
    for q in (0.3, torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)):

        def one(x: Tensor, q: Any = q) -> Tensor:
            return function(x, q, dim=dim, interpolation=interpolation)

        expected = torch.stack([one(x) for x in X])
        torch.testing.assert_close(vmap(one)(X), expected)
        torch.testing.assert_close(vmap(one, in_dims=-1, out_dims=-1)(X.movedim(0, -1)),
                                   expected.movedim(0, -1))  # fmt: skip

        def loss(x: Tensor, one: Any = one) -> Tensor:
            return one(x).sin().sum()

        slopes = torch.stack([grad(loss)(x) for x in X])
        torch.testing.assert_close(vmap(grad(loss))(X), slopes)
        torch.testing.assert_close(grad(lambda x, f=loss: vmap(f)(x).sum())(X), slopes)


def test_a_quantile_of_each_examples_own() -> None:
    q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    expected = torch.stack([torch.quantile(x, p, dim=0) for x, p in zip(X, q, strict=True)])
    torch.testing.assert_close(vmap(lambda x, p: torch.quantile(x, p, dim=0))(X, q), expected)


@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_values_that_are_not_numbers(function: Any) -> None:
    x = X.clone()
    x[1, 2] = torch.nan
    expected = torch.stack([function(one, 0.4, dim=0) for one in x])
    found = vmap(lambda one: function(one, 0.4, dim=0))(x)
    torch.testing.assert_close(found, expected, equal_nan=True)
