"""Writes into a value with a tangent, where the primal is batched and the tangent is not."""

from __future__ import annotations

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
