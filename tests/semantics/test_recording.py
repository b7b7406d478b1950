"""Laws: a vmapped function's results belong to the same graphs as the loop's results.

The functions turn grad mode off, or start backward passes by ``torch.autograd``. Their results
depend on tensors that are differentiated by outside of vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import vmap

Example = Callable[[Tensor], Tensor]


def by_loop(f: Example) -> Example:
    return lambda x: torch.stack([f(row) for row in x])


def model(w: Tensor, v: Tensor) -> Tensor:
    return (v * w).sin() * w


def pulled_back(w: Tensor, create_graph: bool) -> Example:
    """Return the pullback of tensors from outside, whose graph was recorded outside of vmap."""
    y = model(w, w)

    def f(v: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(y, w, v, retain_graph=True, create_graph=create_graph)
        return grad

    return f


def own_gradient(w: Tensor, create_graph: bool) -> Example:
    """Return a function that differentiates by a tensor that it makes."""

    def f(v: Tensor) -> Tensor:
        v = v.detach().requires_grad_()
        (grad,) = torch.autograd.grad(model(w, v).sum(), v, create_graph=create_graph)
        return grad

    return f


def without_recording(w: Tensor) -> Example:
    def f(v: Tensor) -> Tensor:
        with torch.no_grad():
            value = model(w, v)
        return value

    return f


def both(w: Tensor) -> Example:
    """Return a function whose result is recorded in part."""
    return lambda v: model(w, v) + pulled_back(w, create_graph=False)(v)


def recorded_again(w: Tensor) -> Example:
    def f(v: Tensor) -> Tensor:
        with torch.no_grad(), torch.enable_grad():
            return model(w, v) + pulled_back(w, create_graph=True)(v)

    return f


FUNCTIONS: dict[str, Callable[[Tensor], Example]] = {
    "pulled-back": lambda w: pulled_back(w, create_graph=False),
    "pulled-back-recorded": lambda w: pulled_back(w, create_graph=True),
    "own-gradient": lambda w: own_gradient(w, create_graph=False),
    "own-gradient-recorded": lambda w: own_gradient(w, create_graph=True),
    "no-grad": without_recording,
    "both": both,
    "recorded-again": recorded_again,
    "tsfunc": lambda w: tsfunc.grad(lambda v: model(w, v).sum()),
}

MAPPED: dict[str, Callable[[Example], Example]] = {
    "vmap": vmap,
    "chunks": lambda f: vmap(f, chunk_size=2),
    "nested": lambda f: lambda x: vmap(vmap(f))(x.reshape(5, 1, 3)).squeeze(1),
}


def drawn() -> tuple[Tensor, Tensor]:
    return torch.randn(3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_results_are_recorded_as_those_of_the_loop(function: Any, mapped: Any) -> None:
    w, x = drawn()
    w.requires_grad_()
    expected, got = by_loop(function(w))(x), mapped(function(w))(x)
    torch.testing.assert_close(got, expected)
    assert got.requires_grad is expected.requires_grad
    if expected.requires_grad:
        grads = [torch.autograd.grad(out.square().sum(), w)[0] for out in (got, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_derivatives_of_results_are_those_of_the_loop(function: Any, mapped: Any) -> None:
    w, x = drawn()
    grads = [
        tsfunc.grad(lambda w, way=way: way(function(w))(x).square().sum() + w.square().sum())(w)
        for way in (mapped, by_loop)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("wrap", [lambda f: f, tsfunc.checkpoint, tsfunc.specialize],
                         ids=["plain", "checkpoint", "specialize"])  # fmt: skip
def test_modes_of_derivatives_and_grad_mode(wrap: Callable[[Example], Example]) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.no_grad()(torch.sin)(x) * x.cos()

    x = torch.randn(3, dtype=torch.float64)
    ones = torch.ones_like(x)
    recorded = -x.sin() * x.sin()
    torch.testing.assert_close(tsfunc.jvp(wrap(f), (x,), (ones,))[1], recorded + x.cos() ** 2)
    torch.testing.assert_close(tsfunc.jacfwd(wrap(f))(x).sum(0), recorded + x.cos() ** 2)
    torch.testing.assert_close(tsfunc.vjp(wrap(f), x)[1](ones)[0], recorded)
    torch.testing.assert_close(tsfunc.jacrev(wrap(f))(x).sum(0), recorded)
    torch.testing.assert_close(tsfunc.linearize(wrap(f), x)[1](ones), recorded)


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
