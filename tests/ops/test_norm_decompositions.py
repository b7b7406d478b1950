"""The decompositions of norms against torch's operators, for drawn arguments."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tsfunc
from tsfunc.ops import differentiable_norms

ORDERS = [None, 1.0, 2.0, 3.0, 0.5, -2.0, float("inf"), float("-inf")]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def drawn(number: int) -> random.Random:
    return random.Random(torch.initial_seed() + number)


def drawn_dims(chosen: random.Random, rank: int) -> list[int] | None:
    dims = chosen.sample(range(rank), chosen.randint(1, rank))
    return chosen.choice([None, [d - chosen.choice([0, rank]) for d in dims]])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("number", range(8))
def test_vector_norm(order: float | None, number: int) -> None:
    chosen = drawn(number)
    shape = chosen.sample([1, 2, 3, 4], chosen.randint(1, 3))
    x = torch.randn(shape, dtype=chosen.choice(DTYPES), requires_grad=True)
    wider = [torch.complex128] if x.is_complex() else [torch.float64]
    options: dict[str, Any] = {
        "dim": drawn_dims(chosen, len(shape)),
        "keepdim": chosen.random() < 0.5,
        "dtype": chosen.choice([None, *wider]),
    }
    out = differentiable_norms.vector_norm(x, order, **options)
    expected = torch.linalg.vector_norm(x, 2 if order is None else order, **options)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(expected)
    (found,) = torch.autograd.grad(out, x, cotangent)
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, cotangent)[0])


@pytest.mark.parametrize("number", range(8))
def test_std(number: int) -> None:
    chosen = drawn(number)
    x = torch.randn(chosen.sample([3, 4, 5], chosen.randint(1, 3)), dtype=torch.float64)
    options: dict[str, Any] = {
        "dim": drawn_dims(chosen, x.dim()),
        "correction": chosen.choice([None, 0, 1, 1.5, 2]),
        "keepdim": chosen.random() < 0.5,
    }
    expected = torch.ops.aten.std.correction(x, **options)
    torch.testing.assert_close(differentiable_norms.std(x, **options), expected)
    both = differentiable_norms.std_mean(x, **options)
    torch.testing.assert_close(both, torch.ops.aten.std_mean.correction(x, **options))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (4, 4)])
def test_distances_of_pairs(p: float, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(differentiable_norms.pdist(x, p), torch.pdist(x, p))
    y = torch.randn(3, shape[1], dtype=torch.float64)
    torch.testing.assert_close(differentiable_norms.cdist(x, y, p), torch.cdist(x, y, p))


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
def test_dropout_scales_what_it_keeps(randomness: str, p: float) -> None:
    x = torch.rand(4, 50, dtype=torch.float64) + 1
    dropout = tsfunc.vmap(lambda x: torch.native_dropout(x, p, True), 1, 1, randomness=randomness)
    out, mask = dropout(x)
    kept = x / (1 - p) if p < 1 else torch.zeros_like(x)
    torch.testing.assert_close(out, torch.where(mask, kept, 0.0))
    if randomness == "same":
        torch.testing.assert_close(mask, mask[:, :1].expand_as(mask))


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 1), (2, 0)])
def test_as_strided_scatter_with_an_offset(in_dims: tuple[Any, ...]) -> None:
    offset = int(torch.randint(1, 4, ()))

    def f(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x.contiguous(), part, (2, 2), (3, 1), offset)

    size = 3
    shapes = [(3, 4), (2, 2)]
    args = [
        torch.randn(shape if dim is None else (*shape[:dim], size, *shape[dim:]))
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    examples = [
        [
            x if dim is None else x.select(dim, i).clone()
            for x, dim in zip(args, in_dims, strict=True)
        ]
        for i in range(size)
    ]
    expected = torch.stack([f(*example) for example in examples])
    torch.testing.assert_close(tsfunc.vmap(f, in_dims)(*args), expected)


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("number", range(3))
def test_gradients_of_distances(p: float, number: int) -> None:
    chosen = drawn(number)
    rows, others, columns = (chosen.randint(2, 5) for _ in range(3))
    x, y = (torch.randn(n, columns, dtype=torch.float64) for n in (rows, others))
    aten: Any = torch.ops.aten
    between = torch.cdist(x, y, p)
    args = (torch.randn_like(between), x, y, p, between)
    expected = aten._cdist_backward(*args)
    torch.testing.assert_close(differentiable_norms.cdist_backward(*args), expected)
    pairs = torch.pdist(x, p)
    of_pairs = (torch.randn_like(pairs), x, p, pairs)
    expected = aten._pdist_backward(*of_pairs)
    torch.testing.assert_close(differentiable_norms.pdist_backward(*of_pairs), expected)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_renorm_and_dist(p: float, dtype: torch.dtype) -> None:
    chosen = drawn(0)
    x = torch.randn(3, 4, 2, dtype=torch.float64).to(dtype)
    dim, most = chosen.choice([0, 1, -1]), chosen.uniform(0.5, 3)
    expected = torch.renorm(x, p, dim, most)
    loose: dict[str, Any] = {} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(differentiable_norms.renorm(x, p, dim, most), expected, **loose)
    if dtype is torch.float64:
        y = torch.randn(4, 2, dtype=dtype)
        torch.testing.assert_close(differentiable_norms.dist(x, y, p), torch.dist(x, y, p))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("margin", [0.0, 0.3, -0.4])
def test_cosine_embedding_loss(reduction: str, margin: float) -> None:
    x, y = torch.randn(2, 6, 3, dtype=torch.float64)
    x[1], y[2], x[3], y[3] = 0.0, 0.0, 0.0, 0.0
    target = torch.tensor([1, -1, 1, -1, -1, 0])
    expected = torch.nn.functional.cosine_embedding_loss(
        x, y, target, margin=margin, reduction=reduction
    )
    number = ["none", "mean", "sum"].index(reduction)
    loss = differentiable_norms.cosine_embedding_loss(x, y, target, margin, number)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
def test_the_sign_of_complex_numbers_at_zero(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.complex128) * (torch.rand(shape) > 0.4)
    torch.testing.assert_close(differentiable_norms.sgn(x), torch.sgn(x))


def test_norms_that_have_no_decomposition() -> None:
    x = torch.randn(3)
    assert differentiable_norms.vector_norm(x, 0) is NotImplemented
    assert differentiable_norms.vector_norm(x[:0], float("inf")) is NotImplemented
    assert differentiable_norms.sgn(x) is NotImplemented
    assert differentiable_norms.renorm(x[None], 0.0, 0, 1.0) is NotImplemented
