"""The state of modules that a specialized function reaches only through their attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tsfunc
from tsfunc import checkpoint, cond, fori_loop, grad, jacrev, load, specialize, vmap
from tsfunc.errors import TypeCheckError


class Counting(nn.Module):
    """A module that assigns its state in each call."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + 1
        return x * self.total


def _loaded(module: nn.Module, folder: Path) -> Any:
    f = specialize(module)
    f(torch.ones(2))
    f.save(folder / "f.tsf")
    loaded = load(folder / "f.tsf")
    loaded.saved_state.values[:] = [torch.zeros(2)]
    return loaded


MADE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda f: f,
    "vmap": lambda f: vmap(f, axis_size=2, in_dims=None, randomness="same"),
    "jacrev": jacrev,
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "partial": functools.partial,
    "no_grad": lambda f: torch.no_grad()(f),
    "specialize": specialize,
    "twice": lambda f: specialize(specialize(f)),
    "inside": lambda f: lambda x: f(x) + 1,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("of", ["module", "specialized", "loaded"])
def test_state_that_is_assigned(kind: str, of: str, tmp_path: Path) -> None:
    x, make = torch.tensor([2.0, 3.0]), MADE[kind]
    want = make(Counting())
    module: Any = Counting()
    if of == "specialized":
        module = specialize(module)
    elif of == "loaded":
        module = _loaded(module, tmp_path)
    got = specialize(make(module))
    for _ in range(3):
        torch.testing.assert_close(got(x), want(x))
    assert got.cache_info().misses == 1


@pytest.mark.parametrize("kind", [*MADE, "checkpoint"])
def test_train_and_eval(kind: str) -> None:
    module = nn.Dropout(1.0)
    f = specialize(checkpoint(module) if kind == "checkpoint" else MADE[kind](module))
    x = torch.ones(2)
    zeros = f(x)
    module.eval()
    assert not zeros.equal(f(x))
    module.train()
    assert zeros.equal(f(x))


BODIES: dict[str, Callable[[Any], Any]] = {
    "checkpoint": checkpoint,
    "cond": lambda f: lambda x: cond(x.sum() > 0, f, torch.sin, x),
    "loop": lambda f: lambda x: fori_loop(0, 3, lambda i, y: f(y), x),
    "map": lambda f: lambda x: tsfunc.map(f, x[None]),
}


@pytest.mark.parametrize("kind", BODIES)
def test_state_that_a_body_assigns_is_refused(kind: str) -> None:
    """The assigned value belongs to the body, and does not exist outside."""
    module = Counting()
    f = specialize(BODIES[kind](module))
    for _ in range(2):
        with pytest.raises(TypeCheckError, match=r"\.total is a value of the body.*self\.total"):
            f(torch.ones(2))
    assert module.total.equal(torch.zeros(2))


def test_values_that_escape_a_body_are_refused() -> None:
    def f(x: Tensor) -> Any:
        kept = []

        def branch(x: Tensor) -> Tensor:
            kept.append(x.exp())
            return x.sin()

        return cond(x.sum() > 0, branch, torch.cos, x) + 1, kept[0]

    with pytest.raises(TypeCheckError, match=r"the function's result is a value.*x\.exp\(\)"):
        specialize(f)(torch.ones(2))
