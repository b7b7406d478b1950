"""Batch and instance norm under vmap against the loop: results, statistics and derivatives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tsfunc import grad, specialize, vmap

EXAMPLES, CHANNELS = 3, 4
NORMS: dict[str, Callable[..., Tensor]] = {
    "batch_norm": lambda x, w, b, m, v, training: F.batch_norm(x, m, v, w, b, training),
    "torch.batch_norm": lambda x, w, b, m, v, training: torch.batch_norm(
        x, w, b, m, v, training, 0.3, 1e-5, True
    ),
    "keywords": lambda x, w, b, m, v, training: torch.batch_norm(
        x, w, b, m, v, momentum=0.3, training=training, cudnn_enabled=False, eps=1e-5
    ),
    "operator": lambda x, w, b, m, v, training: torch.ops.aten.batch_norm(
        x, w, b, m, v, training, 0.3, 1e-5, True
    ),
    "instance_norm": lambda x, w, b, m, v, training: F.instance_norm(x, m, v, w, b, training),
}


def stacked(x: Tensor, dim: int | None) -> Tensor:
    return x[0] if dim is None else x.movedim(0, dim)


def example(x: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    return x if x is None or dim is None else x.select(dim, i)


class Call:
    """A drawn call of a norm: the arguments, and the dims that vmap maps over."""

    def __init__(self, name: str, chosen: random.Random) -> None:
        spatial = chosen.sample([2, 3, 5], 2)
        x_dim = chosen.randint(0, 4)
        self.tensors: list[Any] = [stacked(torch.randn(EXAMPLES, 2, 4, *spatial), x_dim)]
        self.dims: list[int | None] = [x_dim]
        has_statistics = chosen.random() < 0.8
        statistics_dim = chosen.randint(0, 1)
        for place in range(4):
            dim = chosen.choice([None, 0, 1]) if place < 2 else statistics_dim
            value = stacked(torch.rand(EXAMPLES, CHANNELS) + 0.5, dim)
            absent = chosen.random() < 0.3 if place < 2 else not has_statistics
            self.tensors.append(None if absent else value)
            self.dims.append(None if absent else dim)
        self.function = NORMS[name]

    def copied(self) -> list[Any]:
        return [None if x is None else x.clone() for x in self.tensors]

    def by_loop(
        self, function: Callable[..., Tensor], tensors: Sequence[Tensor | None], training: bool
    ) -> Tensor:
        return torch.stack([
            function(*(map(example, tensors, self.dims, [i] * 5)), training)
            for i in range(EXAMPLES)
        ])  # fmt: skip


def trainings(call: Call, chosen: random.Random) -> list[bool]:
    """Return the modes of the calls, each of which may find the plans of those before it."""
    if call.tensors[3] is None:
        return [True] * 3
    return [chosen.random() < 0.5 for _ in range(5)]


def check(call: Call, function: Callable[..., Tensor], chosen: random.Random) -> None:
    """Compare calls under vmap with the loop, and the statistics after each call."""
    ours, expected = call.copied(), call.copied()
    for training in trainings(call, chosen):

        def f(*tensors: Any, training: bool = training) -> Tensor:
            return function(*tensors, training)

        out = vmap(f, tuple(call.dims))(*ours)
        torch.testing.assert_close(out, call.by_loop(function, expected, training))
        for found, running in zip(ours[3:], expected[3:], strict=True):
            torch.testing.assert_close(found, running)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("number", range(12))
def test_calls_are_the_loop_in_training_and_evaluation(name: str, number: int) -> None:
    chosen = random.Random(torch.initial_seed() + number)
    call = Call(name, chosen)
    check(call, call.function, chosen)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("number", range(4))
def test_derivatives_of_examples_are_those_of_the_loop(name: str, number: int) -> None:
    chosen = random.Random(torch.initial_seed() + number)
    call = Call(name, chosen)

    def loss(*args: Any) -> Tensor:
        return call.function(*args).sin().sum()

    check(call, grad(loss), chosen)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("number", range(4))
def test_statistics_made_inside_are_those_of_each_example(name: str, number: int) -> None:
    chosen = random.Random(torch.initial_seed() + number)
    call = Call(name, chosen)
    for training in [chosen.random() < 0.5 for _ in range(5)]:

        def f(
            x: Tensor, w: Any, b: Any, _: Any, __: Any, training: bool = training
        ) -> tuple[Tensor, ...]:
            mean, variance = torch.zeros(CHANNELS), torch.ones(CHANNELS)
            return call.function(x, w, b, mean, variance, training), mean, variance

        out = vmap(f, tuple(call.dims))(*call.tensors)
        for i, found in enumerate(out):

            def loop(*args: Any, i: int = i) -> Tensor:
                return f(*args)[i]

            torch.testing.assert_close(found, call.by_loop(loop, call.tensors, training))


@pytest.mark.parametrize("name", NORMS)
def test_programs_are_the_loop(name: str) -> None:
    chosen = random.Random(torch.initial_seed())
    call = Call(name, chosen)
    ours, expected = call.copied(), call.copied()

    def evaluating(*tensors: Any) -> Tensor:
        return call.function(*tensors, False)

    def learning(*tensors: Any) -> Tensor:
        return call.function(*tensors, True)

    programs = [specialize(vmap(f, tuple(call.dims))) for f in (evaluating, learning)]
    for training in trainings(call, chosen):
        out = programs[training](*ours)
        torch.testing.assert_close(out, call.by_loop(call.function, expected, training))
        for found, running in zip(ours[3:], expected[3:], strict=True):
            torch.testing.assert_close(found, running)
