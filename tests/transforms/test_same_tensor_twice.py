"""A tensor that a call gets in two roles is treated as two tensors with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import custom_jvp, custom_vjp, grad, jvp, vjp, vmap

X = torch.arange(9, dtype=torch.float64).view(3, 3).sin()
S = torch.tensor([0.7, -0.4], dtype=torch.float64)


def written(a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * b


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return written(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return a.cos() * b * g, a.sin() * g


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return written(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return a.cos() * b * g, a.sin() * g


by_jvp = custom_jvp(written)
by_jvp.defjvp(lambda primals, tangents: jvp(written, primals, tangents))
by_vjp = custom_vjp(written)
by_vjp.defvjp(lambda *args: (written(*args), args), lambda res, ct: vjp(written, *res)[1](ct))

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "backward(ctx)": OldStyle.apply,
    "setup_context": NewStyle.apply,
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
}


def _slope(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return grad(lambda x: f(x).sin().sum())


PROGRAMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two dims": lambda call, x: vmap(call, (0, 1))(x, x),
    "two dims, swapped": lambda call, x: vmap(lambda a, b: call(b, a), (0, -1), 1)(x, x),
    "mapped and not": lambda call, x: vmap(lambda a, b: call(a, b[0]), (1, None))(x, x),
    "one level differentiates": lambda call, x: vmap(
        lambda s: _slope(lambda y: _slope(lambda z: call(z, x) * s)(y))(x)
    )(S),
    "tangents": lambda call, x: vmap(
        lambda s: jvp(lambda y: _slope(lambda z: call(z, x) * s)(y), (x,), (x,))[1]
    )(S),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", CALLS)
def test_each_role_has_its_own_derivative(kind: str, program: str) -> None:
    """In two dims of a vmap, mapped and unmapped, and differentiated by a level or not."""
    call, run = CALLS[kind], PROGRAMS[program]
    torch.testing.assert_close(run(call, X), run(written, X))
    torch.testing.assert_close(
        _slope(lambda x: run(call, x))(X), _slope(lambda x: run(written, x))(X)
    )
