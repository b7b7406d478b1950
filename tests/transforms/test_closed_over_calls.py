"""Calls on tensors from outside alone, in programs, have the derivatives of the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import tsfunc as ts
from tsfunc.errors import ExportError


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.sin()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return ct * ctx.saved_tensors[0].cos() * 2  # not the derivative of forward


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, factor: float) -> Tensor:
        return a * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return ct * ctx.factor * 3, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, factor: float) -> Any:
        return scaled(a, factor), in_dims[0]


sine: Callable[[Tensor], Tensor] = Sine.apply
scaled: Callable[[Tensor, float], Tensor] = Scaled.apply


by_jvp = ts.custom_jvp(lambda a: a.sin())
by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), tangents[0] * 5))
by_vjp = ts.custom_vjp(lambda a: a.sin())
by_vjp.defvjp(lambda a: (by_vjp(a), a), lambda a, ct: (ct * a * 7,))
MATRIX = torch.tensor([[3.0, 1, 0], [1, 4, 0], [0, 1, 5]], dtype=torch.float64)

# Each takes the tensor from outside, and the program's argument.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function": lambda x, p: sine(x) + p,
    "a function with a rule": lambda x, p: scaled(x, 2.0) + p,
    "of its own result": lambda x, p: sine(sine(x)) + p,
    "twice": lambda x, p: sine(x) * sine(x) + p,
    "custom_jvp": lambda x, p: by_jvp(x) + p,
    "custom_vjp": lambda x, p: by_vjp(x) + p,
    "mapped": lambda x, p: ts.vmap(sine)(x) + p,
    "in a vmap over the argument": lambda x, p: ts.vmap(lambda a: sine(x) * a)(p).sum(0),
    "a rule in a vmap": lambda x, p: ts.vmap(lambda a: scaled(x, 2.0) * a)(p).sum(0),
    "in a gradient": lambda x, p: ts.grad(lambda a: (sine(x) * a).sum())(p),
    "in a gradient by it": lambda x, p: ts.grad(lambda a: (sine(x) * a).sum())(x) + p,
    "its gradient": lambda x, p: ts.grad(lambda a: sine(a).sum())(x) + p,
    "its pullback": lambda x, p: ts.vjp(sine, x)[1](p)[0],
    "checkpoint": lambda x, p: ts.checkpoint(sine)(x) + p,
    "checkpoint of torch": lambda x, p: torch.utils.checkpoint.checkpoint(
        sine, x, use_reentrant=False
    ) + p,
    "in a scan": lambda x, p: ts.scan(lambda c, a: (c + sine(a), sine(x)), x[0], x)[1].sum(0) + p,
    "in a loop": lambda x, p: ts.fori_loop(0, 3, lambda i, c: c * sine(x), x) + p,
    "in a branch": lambda x, p: ts.cond(p.sum() > 9, lambda: sine(x), lambda: x.cos()) + p,
    "a linear solve": lambda x, p: ts.linear_solve(
        lambda v: MATRIX @ v, x, lambda _, b: torch.linalg.solve(MATRIX, b)
    ) + p,
    "torch.autograd.grad": lambda x, p: torch.autograd.grad(
        sine(x).sum(), x, create_graph=True
    )[0] + p,
    "without grad": lambda x, p: x + sine(x.detach()) + p,
}  # fmt: skip


def value_and_grad(f: Callable[[Tensor], Tensor], x: Tensor, p: Tensor) -> Any:
    out = f(p)
    assert out.requires_grad, "the gradient is lost"
    return out.detach(), torch.autograd.grad(out.square().sum(), x, allow_unused=True)[0]


@pytest.mark.parametrize("backend", ["python", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_by_tensors_from_outside(name: str, backend: str) -> None:
    call = CALLS[name]
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    p = torch.randn(3, dtype=torch.float64)

    def f(p: Tensor) -> Tensor:
        return call(x, p)

    program = ts.specialize(f, backend=backend)
    try:
        found = [value_and_grad(program, x, p) for _ in range(2)]
    except ExportError:
        assert backend != "python"
        return  # torch has no operator for the call, and the backend's error states this
    for each in found:
        torch.testing.assert_close(each, value_and_grad(f, x, p))


@pytest.mark.parametrize("name", ["in a scan", "in a loop", "in a gradient by it"])
def test_a_backend_takes_calls_without_derivatives(name: str) -> None:
    x, p = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def f(p: Tensor) -> Tensor:
        return CALLS[name](x, p)

    program = ts.specialize(f, backend="aot_eager")
    torch.testing.assert_close(program(p), f(p))
