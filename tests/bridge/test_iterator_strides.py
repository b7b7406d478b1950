"""Strides of broadcast results in traces: those of torch's kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import jacfwd, specialize, vmap

# By the number of operands.
FUNCTIONS: dict[int, dict[str, Callable[..., Tensor]]] = {
    1: {
        "sin": torch.sin,
        "logical_not": torch.logical_not,
        "gelu": torch.nn.functional.gelu,
        "clamp": lambda x: x.clamp(0, 1),
        "power": lambda x: x**2,
        "power of a number": lambda x: 2**x,
        "plus a number": lambda x: torch.add(x, 2.0, alpha=2),
        "from a number": lambda x: 1 - x,
        "by a number": lambda x: x / 3,
        "floor by a number": lambda x: x // 2.0,
        "remainder by a number": lambda x: x.remainder(2.0),
        "compared with a number": lambda x: x.gt(0),
        "masked": lambda x: x.masked_fill(x > 0, 1.0),
        "where and a number": lambda x: torch.where(x > 0, x, 1.0),
        "xlogy": lambda x: torch.xlogy(x, 2.0),
    },
    2: {
        "add": torch.add,
        "mul": torch.mul,
        "atan2": torch.atan2,
        "maximum": torch.maximum,
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    },
    3: {
        "addcmul": torch.addcmul,
        "where": lambda x, y, z: torch.where(x.gt(0), y, z),
    },
}


def _laid_out(shape: list[int], rng: random.Random) -> Tensor:
    """Return a tensor whose dims are permuted in memory, some with gaps."""
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.randn([shape[i] * rng.choice((1, 1, 2)) for i in order])
    for dim, i in enumerate(order):
        x = x.narrow(dim, 0, shape[i])
    return x.permute([order.index(i) for i in range(len(shape))])


@pytest.mark.parametrize(
    ("count", "name"), [(count, name) for count, found in FUNCTIONS.items() for name in found]
)
def test_operands_in_any_layout(count: int, name: str, request: pytest.FixtureRequest) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed} {name}")
    f = FUNCTIONS[count][name]
    for _ in range(8):
        sizes = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 5))]

        def operand(sizes: list[int] = sizes) -> Tensor:
            kept = sizes[-rng.choice((len(sizes), rng.randint(1, len(sizes)))) :]
            return _laid_out([n if rng.random() < 0.7 else 1 for n in kept], rng)

        operands = [operand() for _ in range(count)]
        if name == "addcmul":  # which writes into the shape of its first operand
            operands[0] = _laid_out(list(torch.broadcast_shapes(*[x.shape for x in operands])), rng)
        strides: list[Any] = []

        def seen(*operands: Tensor, strides: list[Any] = strides) -> Tensor:
            out = f(*operands)
            strides[:] = out.stride()
            return out * 2

        specialize(seen)(*operands)
        assert tuple(strides) == f(*operands).stride(), [(x.shape, x.stride()) for x in operands]


@pytest.mark.parametrize("size", [1, 2])
def test_a_view_in_the_program_of_a_jacobian_over_the_last_dim(size: int) -> None:
    f = vmap(jacfwd(lambda v: (v * 2).reshape(-1)[:3]), in_dims=3)
    x = torch.randn(3, 4, 4, size)
    torch.testing.assert_close(specialize(f)(x), f(x))


def _drawn_indices(x: Tensor, rng: random.Random) -> tuple[Any, ...]:
    """Return indices of some dims, which broadcast, in any layout."""
    sizes = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3))]
    indices: list[Any] = [slice(None)] * x.dim()
    for dim in rng.sample(range(x.dim()), rng.randint(1, x.dim())):
        kept = [n if rng.random() < 0.8 else 1 for n in sizes][rng.choice((0, 0, -1)) :]
        indices[dim] = _laid_out(kept, rng).abs().mul(9).long() % x.shape[dim]
    return tuple(indices)


def test_an_indexed_tensor(request: pytest.FixtureRequest) -> None:
    """The result has the layout of the indices in the indexed dims."""
    rng = random.Random(f"{request.config.option.hypothesis_seed}")
    for _ in range(40):
        x = _laid_out([rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4))], rng)
        indices = _drawn_indices(x, rng)
        known: list[Any] = []

        def f(x: Tensor) -> Tensor:
            result: Tensor = x[indices]  # noqa: B023 - called in this step of the loop
            known.extend(result.stride())  # noqa: B023
            return result

        result = specialize(f)(x)
        pairs = zip(known, x[indices].stride(), result.shape, strict=True)
        assert all(step == expected for step, expected, size in pairs if size > 1)
        torch.testing.assert_close(result, x[indices])


@pytest.mark.parametrize("shape", [None, ["b", "t"], ["b", 5]])
def test_a_view_of_a_tensor_indexed_in_another_order(shape: Any) -> None:
    """A derivative takes a view where the eager result has one, and copies where it has none."""
    weight = torch.randn(7, 3, requires_grad=True)

    def f(tokens: Tensor) -> Any:
        rows = weight[tokens[:, :-1].T]
        target = tokens[:, 1:].T.flatten() % 3
        loss = torch.nn.functional.cross_entropy(rows.flatten(0, 1), target)
        return torch.autograd.grad(loss, weight)

    program = specialize(f) if shape is None else specialize(f, {"tokens": Meta(shape)})
    for batch in (4, 2):
        tokens = torch.randint(0, 7, (batch, 5))
        torch.testing.assert_close(program(tokens), f(tokens))
