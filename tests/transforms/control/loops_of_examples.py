"""Loops whose number of steps differs from example to example, and their values one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import fori_loop, grad, jvp

Loop = Callable[[torch.Tensor, torch.Tensor], Any]


def inputs(counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three numbers and a count of steps for each example."""
    x = torch.linspace(-1, 1, 3 * len(counts), dtype=torch.float64).reshape(len(counts), 3)
    return x, torch.tensor(counts)


def each_alone(f: Callable[..., Any], *columns: torch.Tensor) -> torch.Tensor:
    """Return the values of the examples, computed one after the other."""
    return torch.stack([f(*row) for row in zip(*columns, strict=True)])


def in_place(x: torch.Tensor, n: torch.Tensor) -> Any:
    """A loop whose step writes into a copy of its carry."""

    def step(i: Any, y: Any) -> Any:
        y = y.clone()
        y[0] = x[1] * i
        y.mul_(1.5).add_(x)
        return y

    return fori_loop(0, n, step, x)


def slope(f: Loop) -> Loop:
    """Return the gradient of the squares of a loop's value."""
    return lambda x, n: grad(lambda x: f(x, n).square().sum())(x)


def tangent(f: Loop) -> Loop:
    """Return the tangent of a loop's value along the cosines of its inputs."""
    return lambda x, n: jvp(lambda x: f(x, n), (x,), (x.cos(),))[1]
