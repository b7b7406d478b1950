"""The backward operators of ``grid_sample``: their formula, and derivatives of any order."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from tsfunc import MetaTensorType, grad, jvp, specialize, vmap
from tsfunc.ops.differentiable_sampling import grid_sampler_backward

MODES = ["bilinear", "nearest", "bicubic"]  # in the order of torch's enum
PADDINGS = ["zeros", "border", "reflection"]
CASES = [
    (rank, mode, padding, aligned)
    for rank, mode, padding, aligned in itertools.product((2, 3), range(3), range(3), (False, True))
    if rank == 2 or mode < 2
]


def drawn(rank: int, sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Return images, and points of which some are outside of the images."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, *sizes[:rank], generator=generator, dtype=torch.float64)
    grid = torch.randn(2, *(2, 3, 4)[:rank], rank, generator=generator, dtype=torch.float64)
    return x, grid * 1.5


@pytest.mark.parametrize(("rank", "mode", "padding", "aligned"), CASES)
@settings(max_examples=4)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
    seed=st.integers(0, 1000),
    mask=st.sampled_from([[True, True], [True, False], [False, True]]),
    special=st.booleans(),
)
def test_the_formula_is_the_operator(
    rank: int, mode: int, padding: int, aligned: bool, sizes: Any, seed: int, mask: Any,
    special: bool,
) -> None:  # fmt: skip
    x, grid = drawn(rank, sizes, seed)
    if special:  # corners, the middle, and points between pixels
        grid.view(-1)[:5] = torch.tensor([-1.0, 1.0, 0.0, 3.0, -2.5])
    aten: Any = torch.ops.aten
    out = getattr(aten, f"grid_sampler_{rank}d")(x, grid, mode, padding, aligned)
    given_ = torch.randn(out.shape, dtype=torch.float64)
    args = (given_, x, grid, mode, padding, aligned, mask)
    expected = getattr(aten, f"grid_sampler_{rank}d_backward")(*args)
    for got, result, wanted in zip(grid_sampler_backward(*args), expected, mask, strict=True):
        assert (got is not None) == wanted
        if got is not None:
            torch.testing.assert_close(got, result, rtol=1e-10, atol=1e-10)
            assert got.stride() == result.stride()


@pytest.mark.parametrize(("rank", "mode", "padding", "aligned"), CASES)
def test_second_derivatives_against_differences(
    rank: int, mode: int, padding: int, aligned: bool
) -> None:
    x, grid = drawn(rank, (3, 4, 5), seed=7)

    def gradients(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor, grid: Tensor) -> Tensor:
            y = F.grid_sample(
                x, grid, MODES[mode], padding_mode=PADDINGS[padding], align_corners=aligned
            )
            return y.sin().sum()

        by_x, by_grid = grad(loss, argnums=(0, 1))(x, grid)
        return by_x, by_grid

    along = [torch.randn(v.shape, dtype=torch.float64) for v in (x, grid)]
    step = 1e-6
    ahead, behind = (
        gradients(x + sign * step * along[0], grid + sign * step * along[1]) for sign in (1, -1)
    )
    _, pushed = jvp(gradients, (x, grid), tuple(along))
    for got, high, low in zip(pushed, ahead, behind, strict=True):
        torch.testing.assert_close(got, (high - low) / (2 * step), rtol=1e-5, atol=1e-5)
    # The second derivative is symmetric, and equal in reverse mode.
    other = [torch.randn(v.shape, dtype=torch.float64) for v in (x, grid)]

    def contracted(x: Tensor, grid: Tensor) -> Tensor:
        return sum(((g * v).sum() for g, v in zip(gradients(x, grid), other, strict=True)),
                   torch.zeros(()))  # fmt: skip

    pulled = grad(contracted, argnums=(0, 1))(x, grid)
    left = sum((a * b).sum() for a, b in zip(pulled, along, strict=True))
    right = sum((a * b).sum() for a, b in zip(pushed, other, strict=True))
    torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("rank", "mode", "padding"), [
    (2, 0, 0), (2, 0, 2), (2, 2, 1), (3, 0, 1),
])  # fmt: skip
def test_one_program_for_named_sizes(rank: int, mode: int, padding: int) -> None:
    def sampled(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(
            x, grid, MODES[mode], padding_mode=PADDINGS[padding], align_corners=False
        )

    def tangent(x: Tensor, grid: Tensor) -> Any:
        return jvp(sampled, (x, grid), (x.cos(), grid.sin()))[1]

    def second(x: Tensor, grid: Tensor) -> Any:
        def first(x: Tensor, grid: Tensor) -> Any:
            by_grid = grad(lambda g: sampled(x, g).sin().sum())(grid)
            return by_grid.sin().sum()

        return grad(first, argnums=(0, 1))(x, grid)

    named: dict[str, Any] = {
        "x": MetaTensorType(["n", "c", *"hwd"[:rank]], dtype=torch.float64),
        "grid": MetaTensorType(["n", *"pqr"[:rank], rank], dtype=torch.float64),
    }
    for f in (tangent, second):
        program = specialize(f, named)
        for sizes in ((3, 4, 5), (6, 2, 3)):
            args = drawn(rank, sizes, seed=sizes[0])
            torch.testing.assert_close(program(*args), f(*args), rtol=1e-10, atol=1e-10)
        assert program.cache_info().programs == 1


def test_second_derivatives_of_each_example() -> None:
    x, grid = drawn(2, (3, 4), seed=3)

    def first(x: Tensor, grid: Tensor) -> Any:
        loss = grad(lambda g: F.grid_sample(x[None], g[None], align_corners=True).sin().sum())
        return loss(grid).sin().sum()

    got = vmap(grad(first, argnums=(0, 1)))(x, grid)
    for i in range(2):
        for part, one in zip(got, grad(first, argnums=(0, 1))(x[i], grid[i]), strict=True):
            torch.testing.assert_close(part[i], one, rtol=1e-10, atol=1e-10)
