"""Functions whose C++ code needs plain sizes: their derivatives in programs of named dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tsfunc import MetaTensorType, grad, jacfwd, specialize, vmap


def _theta(x: Tensor, rank: int) -> Tensor:
    """Return three affine transforms that depend on all elements."""
    entries = torch.arange(rank * (rank + 1), dtype=x.dtype).view(rank, rank + 1)
    return x.sum() * entries.sin() + x.sin().sum() * torch.arange(3, dtype=x.dtype).view(3, 1, 1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": torch.cov,
    "cov of a vector": lambda x: torch.cov(x[0]),
    "cov without correction": lambda x: torch.cov(x, correction=0),
    "corrcoef": torch.corrcoef,
    "kron": lambda x: torch.kron(x, x.sin()),
    "kron of ranks": lambda x: torch.kron(x[0], x),
    "block_diag": lambda x: torch.block_diag(x, x[0], x.sum(), x.sin()),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x.mT, x]),
    "multi_dot of vectors": lambda x: torch.linalg.multi_dot([x[0], x.mT, x, x[1]]),
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1), dim=1),
    "take_along_dim, broadcast": lambda x: x[0, None].take_along_dim(x.argsort(-1), dim=-1),
    "take_along_dim without a dim": lambda x: torch.take_along_dim(x, x.argsort(0)),
    "nearest": lambda x: F.interpolate(x[None], scale_factor=2.5),
    "linear": lambda x: F.interpolate(x[None], scale_factor=2, mode="linear", align_corners=True),
    "bilinear": lambda x: F.interpolate(x[None, None], scale_factor=1.5, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x[None, None], scale_factor=(2, 1.5), mode="bicubic"),
    "affine_grid": lambda x: F.affine_grid(_theta(x, 2), [3, 1, *x.shape], align_corners=False),
    "affine_grid, aligned": lambda x: F.affine_grid(
        _theta(x, 2), [3, 2, *x.shape], align_corners=True
    ),
    "affine_grid of volumes": lambda x: F.affine_grid(
        _theta(x, 3), [3, 1, 2, *x.shape], align_corners=False
    ),
}
DESCRIPTORS: dict[str, Any] = {"rows": ["n", 6], "columns": [4, "m"], "both": ["n", "m"]}


def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).sin().sum()


def slope(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(f)(leaf), leaf)
    return found


def test_affine_grid_names_wrong_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        return F.affine_grid(x[None, :, :2], [1, 1, *x.shape], align_corners=False)

    with pytest.raises(ValueError, match=r"theta of shape \(1, 2, 3\).*got \(1, 2, 2\)"):
        specialize(f, {"x": MetaTensorType([2, "m"])})(torch.ones(2, 4))


@pytest.mark.parametrize("named", DESCRIPTORS)
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=1)
@given(sizes=st.tuples(st.integers(2, 5), st.integers(3, 7)))
def test_gradients_of_named_dims(name: str, named: str, sizes: tuple[int, int]) -> None:
    f = FUNCTIONS[name]
    program = specialize(grad(loss(f)), {"x": MetaTensorType(DESCRIPTORS[named])})
    for rows, columns in ((3, 4), sizes):
        x = torch.randn(
            4 if named == "columns" else rows,
            6 if named == "rows" else columns,
            dtype=torch.float64,
        )
        torch.testing.assert_close(program(x), slope(f, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["cov", "corrcoef", "kron", "block_diag", "take_along_dim", "linear"]
)
def test_forward_mode_of_named_dims(name: str) -> None:
    f = FUNCTIONS[name]
    program = specialize(jacfwd(loss(f)), {"x": MetaTensorType(["n", 6])})
    for rows in (3, 5):
        x = torch.randn(rows, 6, dtype=torch.float64)
        torch.testing.assert_close(program(x), slope(f, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", [torch.cov, torch.corrcoef])
def test_the_covariance_of_one_row_has_no_dims(function: Callable[[Tensor], Tensor]) -> None:
    row = torch.randn(1, 4, dtype=torch.float64)
    expected = function(row).expand(3)
    torch.testing.assert_close(specialize(lambda x: function(x).expand(3))(row), expected)
    mapped = specialize(lambda xs, row: vmap(lambda x: function(row))(xs))
    torch.testing.assert_close(mapped(torch.ones(3), row), expected)


@pytest.mark.parametrize("of", ["fweights", "aweights", "both"])
@pytest.mark.parametrize("correction", [0, 1])
def test_weights_of_cov(of: str, correction: int) -> None:
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    counts, weights = torch.randint(1, 4, (4, 5)), torch.rand(4, 5, dtype=torch.float64)

    def f(x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        given_weights: Any = {
            "fweights": None if of == "aweights" else counts,
            "aweights": None if of == "fweights" else weights,
        }
        return torch.cov(x, correction=correction, **given_weights)

    args = (x, counts, weights)
    expected = torch.stack([f(*each) for each in zip(*args, strict=True)])
    for mapped in (vmap(f), specialize(vmap(f))):
        torch.testing.assert_close(mapped(*args), expected)
    leaf = x[0].clone().requires_grad_()
    (slopes,) = torch.autograd.grad(f(leaf, counts[0], weights[0]).sin().sum(), leaf)
    found = grad(lambda x, c, w: f(x, c, w).sin().sum())
    for call in (found, specialize(found)):
        torch.testing.assert_close(call(x[0], counts[0], weights[0]), slopes)
    with pytest.raises(RuntimeError, match="cannot be negative"):
        vmap(f)(x, -counts, -weights)
