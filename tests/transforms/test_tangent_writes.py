"""Writes into a value with a tangent, where the primal is batched and the tangent is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import grad, hessian, jacfwd, jacrev, jvp, vmap

X = torch.linspace(-1, 1.3, 30, dtype=torch.float64).reshape(5, 2, 3).sin()
TANGENTS = torch.linspace(0.2, 1.7, 24, dtype=torch.float64).reshape(4, 2, 3).cos()

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "by a number": lambda y, x: y.mul_(2),
    "by a tensor": lambda y, x: y.mul_(x),
    "elementwise": lambda y, x: y.sin_(),
    "of a sum": lambda y, x: y.add_(x * x),
    "of an item": lambda y, x: y.__setitem__(0, x[1].sin()),
    "into a view": lambda y, x: y[0].mul_(x[1]),
    "into a transpose": lambda y, x: y.transpose(0, -1).__imul__(2),
    "of a copy": lambda y, x: y.copy_(x.sin()),
    "of a number": lambda y, x: y.copy_(2),  # type: ignore[arg-type]
}
Function = Callable[[Tensor], Tensor]


def along_tangents(f: Function) -> Function:
    return lambda x: vmap(lambda t: jvp(f, (x,), (t,))[1])(TANGENTS)


TOWERS: dict[str, Callable[[Function], Function]] = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (TANGENTS[0],))[1],
    "jvp by vmap": along_tangents,
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (TANGENTS[0],))[1].square().sum()),
    "grad of jvp by vmap": lambda f: grad(lambda x: along_tangents(f)(x).square().sum()),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "hessian": lambda f: hessian(lambda x: f(x).square().sum()),
    "jvp of jvp": lambda f: (
        lambda x: jvp(lambda y: jvp(f, (y,), (TANGENTS[0],))[1], (x,), (TANGENTS[1],))[1]
    ),
}


@pytest.mark.parametrize("backend", [None, "specialize"])
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("write", WRITES)
def test_each_example_is_written_as_if_alone(write: str, tower: str, backend: str | None) -> None:
    def written(x: Tensor) -> Tensor:
        y = x.clone()
        WRITES[write](y, x)
        return y

    derivative = TOWERS[tower](written)
    expected = torch.stack([derivative(x) for x in X])
    mapped = vmap(derivative, chunk_size=2 if backend is None else None)
    found = (tsfunc.specialize(mapped) if backend else mapped)(X)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    "curvature",
    [
        hessian,
        lambda f: jacfwd(grad(f)),
        lambda f: lambda x: jvp(grad(f), (x,), (torch.ones_like(x),))[1],
        lambda f: tsfunc.checkpoint(hessian(f)),
    ],
    ids=["hessian", "jacfwd of grad", "jvp of grad", "checkpoint of hessian"],
)
def test_a_backward_pass_writes_into_examples_with_gaps(
    curvature: Any, at: int, program: bool
) -> None:
    """The backward pass of a write into a view writes into a tensor with the base's strides."""

    def f(x: Tensor) -> Tensor:
        y = x.sin().transpose(0, -1)
        y[0].tanh_()
        return (y * torch.arange(6.0, dtype=x.dtype).view_as(y)).sum()

    x = torch.randn(2, 3, 4, dtype=torch.float64).movedim(2, at)
    x = x.contiguous()  # examples are dense only if the batch dim is first
    expected = torch.stack([curvature(f)(each.contiguous()) for each in x.unbind(at)])
    mapped = vmap(curvature(f), at)
    torch.testing.assert_close((tsfunc.specialize(mapped) if program else mapped)(x), expected)


MADE: list[Callable[[], Tensor]] = [
    lambda: torch.zeros(3, 8, dtype=torch.float64)[:, 2:6],
    lambda: torch.zeros(3, 8, dtype=torch.float64)[:, ::2],
    lambda: torch.zeros(4, 5, dtype=torch.float64)[:, 1:4].T,
    lambda: torch.zeros(5, 3, 4, dtype=torch.float64)[2],
    lambda: torch.zeros(4, 3, dtype=torch.float64).T,
]
SEEN: list[Callable[[Tensor], Tensor]] = [
    lambda z: z[0],
    lambda z: z[:, 1],
    lambda z: z[1:, ::2],
    lambda z: z.T,
    lambda z: z,
]
FILLED: list[Callable[[Tensor, Tensor], Any]] = [
    lambda z, x: z.copy_(x * x.sum()),
    lambda z, x: z.add_(x * x),
    lambda z, x: z[0].add_(x[0] * x[1]),
    lambda z, x: z.T.add_(x.T.sin()),
    lambda z, x: z.__setitem__((slice(None), 0), x[:, 1] * x[:, 2]),
]
CURVATURES: list[Any] = [hessian, lambda f: jacfwd(jacfwd(f)), lambda f: jacfwd(grad(f)), jacfwd]


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("drawn", range(20))
def test_a_tensor_made_inside_keeps_its_place_in_memory(drawn: int, program: bool) -> None:
    """Forward mode views the tangent of a base again, by the strides and offsets of views.

    A write makes the tensor batched after tracers of inner levels have copied its strides.
    """
    rng = random.Random(torch.initial_seed() + drawn)
    made, seen, filled = rng.choice(MADE), rng.choice(SEEN), rng.choice(FILLED)
    curvature, at, before = rng.choice(CURVATURES), rng.randrange(3), rng.random() < 0.7

    def f(x: Tensor) -> Tensor:
        z = made()
        view = seen(z)
        filled(z, x)
        view = view if before else seen(z)
        return (view**2).sum() + (z.sum() * x[0]).sin().sum()

    x = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.stack([curvature(f)(each) for each in x])
    mapped = vmap(curvature(f), at)
    found = (tsfunc.specialize(mapped) if program else mapped)(x.movedim(0, at).contiguous())
    torch.testing.assert_close(found, expected)
