"""Derivatives in functions that turn grad mode off, or that start backward passes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc

BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "checkpoint": tsfunc.checkpoint(lambda x: x.sin() * x),
    "cond": lambda x: tsfunc.cond(x.sum() < 9, lambda x: x.sin() * x, torch.cos, x),
    "switch": lambda x: tsfunc.switch(x.argmax(), [torch.sin, torch.cos, torch.exp], x),
    "while_loop": lambda x: tsfunc.while_loop(
        lambda x: x.abs().sum() > 0.3, lambda x: x.sin() / 2, x
    ),
    "fori_loop": lambda x: tsfunc.fori_loop(0, 3, lambda i, x: x.sin() + i, x),
    "scan": lambda x: tsfunc.scan(lambda c, x: ((c * x).sin(), c), x[0], x)[1],
    "map": lambda x: tsfunc.map(torch.sin, x),
    "associative_scan": lambda x: tsfunc.associative_scan(torch.mul, x),
    "no_grad in a body": lambda x: tsfunc.cond(
        x.sum() < 9, lambda x: torch.no_grad()(torch.sin)(x) * x, torch.cos, x
    ),
}
REVERSE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda f, x: tsfunc.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: tsfunc.vjp(f, x)[1](f(x).detach().cos())[0],
    "jacrev": lambda f, x: tsfunc.jacrev(f)(x),
    "linearize": lambda f, x: tsfunc.linearize(f, x)[1](x.cos()),
    "grad of grad": lambda f, x: tsfunc.grad(
        lambda x: tsfunc.grad(lambda x: f(x).sin().sum())(x).sin().sum()
    )(x),
    "vmap of grad": lambda f, x: tsfunc.vmap(tsfunc.grad(lambda x: f(x).sum()))(x[None]),
}


@pytest.mark.parametrize("derivative", REVERSE)
@pytest.mark.parametrize("body", BODIES)
def test_a_derivative_with_grad_mode_off_around_it(body: str, derivative: str) -> None:
    """Its value is that with grad mode on; in a program, too, whose bodies are graphs."""
    x = torch.randn(3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return REVERSE[derivative](BODIES[body], x)

    expected = f(x)
    for quiet in (torch.no_grad()(f), tsfunc.specialize(torch.no_grad()(f))):
        leaf = x.clone().requires_grad_()
        result = quiet(leaf)
        torch.testing.assert_close(result, expected)
        assert not result.requires_grad


def by_autograd_grad(x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad((leaf**3).sum(), leaf)[0]


def by_backward(x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    (leaf**3).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("passed", [by_autograd_grad, by_backward])
def test_a_pass_inside_leaves_the_rest_of_the_function_recorded(
    passed: Callable[[Tensor], Tensor],
) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return passed(x) * y.sin()

    x, y = torch.randn(2, 3, dtype=torch.float64)
    leaf, other = y.clone().requires_grad_(), y.clone().requires_grad_()
    program = tsfunc.specialize(f)
    f(x, leaf).sum().backward()
    program(x, other).sum().backward()
    torch.testing.assert_close(other.grad, leaf.grad)
    for transform in (tsfunc.jacrev, tsfunc.jacfwd):
        expected = transform(f, (0, 1))(x, y)
        torch.testing.assert_close(transform(program, (0, 1))(x, y), expected)
        torch.testing.assert_close(tsfunc.specialize(transform(f, (0, 1)))(x, y), expected)
