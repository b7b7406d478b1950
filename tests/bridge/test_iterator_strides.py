"""Strides of broadcast results in traces: those of torch's kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import jacfwd, specialize, vmap

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "addcmul": torch.addcmul,
    "where": lambda x, y, z: torch.where(x.gt(0), y, z),
}


def _laid_out(shape: list[int], rng: random.Random) -> Tensor:
    """Return a tensor whose dims are permuted in memory, some with gaps."""
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.randn([shape[i] * rng.choice((1, 1, 2)) for i in order])
    for dim, i in enumerate(order):
        x = x.narrow(dim, 0, shape[i])
    return x.permute([order.index(i) for i in range(len(shape))])


def _steps(shape: Any, strides: Any) -> list[int]:
    return [step for n, step in zip(shape, strides, strict=True) if n != 1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_broadcast_operands_in_any_layout(name: str, request: pytest.FixtureRequest) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed} {name}")
    f = FUNCTIONS[name]
    for _ in range(12):
        sizes = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 5))]

        def operand(sizes: list[int] = sizes) -> Tensor:
            kept = sizes[-rng.choice((len(sizes), rng.randint(1, len(sizes)))) :]
            return _laid_out([n if rng.random() < 0.7 else 1 for n in kept], rng)

        operands = [operand() for _ in range(3 if name in ("addcmul", "where") else 2)]
        if name == "addcmul":  # which writes into the shape of its first operand
            operands[0] = _laid_out(list(torch.broadcast_shapes(*[x.shape for x in operands])), rng)
        strides: list[Any] = []

        def seen(*operands: Tensor, strides: list[Any] = strides) -> Tensor:
            out = f(*operands)
            strides[:] = out.stride()
            return out * 2

        specialize(seen)(*operands)
        want = f(*operands)
        assert _steps(want.shape, strides) == _steps(want.shape, want.stride()), operands


@pytest.mark.parametrize("size", [1, 2])
def test_a_view_in_the_program_of_a_jacobian_over_the_last_dim(size: int) -> None:
    f = vmap(jacfwd(lambda v: (v * 2).reshape(-1)[:3]), in_dims=3)
    x = torch.randn(3, 4, 4, size)
    torch.testing.assert_close(specialize(f)(x), f(x))
