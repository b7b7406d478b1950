"""Numbers and sizes that vary in functions with control flow: programs are compared by bodies."""

from __future__ import annotations

import random
import secrets
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import (
    MetaTensorType,
    associative_scan,
    checkpoint,
    cond,
    fori_loop,
    grad,
    scan,
    specialize,
    vmap,
    while_loop,
)

SETTINGS = types.SimpleNamespace(rate=0.5)


def positive(x: Tensor) -> Tensor:
    return x.sum() > 0


def summed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).sum()


BODIES: dict[str, Callable[[Callable[[], float], Tensor], Tensor]] = {
    "scan": lambda rate, x: scan(lambda c, row: (c + row * rate(), c * row), x[0], x)[1],
    "cond": lambda rate, x: cond(positive(x), lambda x: x.sin() * rate(), torch.cos, x),
    "both branches": lambda rate, x: cond(
        positive(x), lambda x: x.sin() * rate(), lambda x: x - rate(), x
    ),
    "while_loop": lambda rate, x: while_loop(
        lambda y: y.sum() < 20, lambda y: y.abs() + rate() + 1, x
    ),
    "fori_loop": lambda rate, x: fori_loop(0, 3, lambda i, y: y.sin() * rate() + i, x),
    "associative_scan": lambda rate, x: associative_scan(lambda a, b: a * rate() + b, x),
    "checkpoint": lambda rate, x: grad(summed(checkpoint(lambda x: (x * rate()).sin())))(x),
    "pullback of scan": lambda rate, x: grad(
        summed(lambda x: scan(lambda c, row: (c.sin() * rate() + row, c * row), x[0], x)[1])
    )(x),
    "vmap of cond": lambda rate, x: vmap(
        lambda row: cond(positive(row), lambda r: r.sin() * rate(), torch.cos, row)
    )(x),
    "vmap(grad) of cond": lambda rate, x: vmap(
        grad(summed(lambda row: cond(positive(row), lambda r: r.sin() * rate(), torch.cos, row)))
    )(x),
    "nested": lambda rate, x: scan(
        lambda c, row: (cond(positive(row), lambda c: c * rate(), torch.neg, c), c + row), x[0], x
    )[1],
}


# Their operators have the operands of bodies by position, which a number among them moves: each
# value has a program of its own.
NUMBERED = ("associative_scan", "checkpoint", "pullback of scan", "vmap(grad) of cond")


def with_rate(name: str, place: str) -> Callable[[Tensor], Tensor]:
    """Return a function that reads the rate inside of the bodies, or beside the control flow."""
    if place == "inside":
        return lambda x: BODIES[name](lambda: SETTINGS.rate, x)
    return lambda x: BODIES[name](lambda: 1.5, x) * SETTINGS.rate


@pytest.mark.parametrize("place", ["inside", "beside"])
@pytest.mark.parametrize("name", BODIES)
def test_a_number_that_varies_becomes_an_input(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    f = with_rate(name, place)
    program = specialize(f)
    for _ in range(4):
        monkeypatch.setattr(SETTINGS, "rate", draw.uniform(0.2, 0.9))
        x = torch.randn(4, 3, dtype=torch.float64)
        torch.testing.assert_close(program(x), f(x))
    alone = place == "inside" and name in NUMBERED
    assert program.cache_info().programs == (4 if alone else 2)


def told_apart(x: Tensor) -> Tensor:
    rate = SETTINGS.rate
    exact: Any = isinstance(rate, float)
    return cond(positive(x), lambda x: x * (rate if exact else 2 * rate), torch.cos, x)


def decided(x: Tensor) -> Tensor:
    rate = SETTINGS.rate
    return cond(positive(x), lambda x: x * (1 if rate > 0.5 else rate), torch.cos, x)


@pytest.mark.parametrize("f", [told_apart, decided])
def test_bodies_that_depend_on_the_number_otherwise(
    f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = specialize(f)
    x = torch.ones(3)
    for rate in (0.25, 0.375, 0.75, 0.875, 0.125):
        monkeypatch.setattr(SETTINGS, "rate", rate)
        torch.testing.assert_close(program(x), f(x))


@pytest.mark.parametrize("name", BODIES)
def test_small_sizes(name: str) -> None:
    f = with_rate(name, "inside")
    program = specialize(f, {"x": MetaTensorType(["n", "m"], dtype=torch.float64)})
    for n, m in ((4, 3), (1, 2), (2, 1), (1, 1), (5, 2)):
        x = torch.randn(n, m, dtype=torch.float64)
        torch.testing.assert_close(program(x), f(x))


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_scheduler_beside_a_recurrent_layer(layer: Any) -> None:
    model = layer(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    program = specialize(step, {"x": MetaTensorType(["t", "n", 3])})
    for length in (2, 3, 4, 5, 2):
        program(torch.randn(length, 4, 3))
        scheduler.step()
    assert program.cache_info().programs == 2
