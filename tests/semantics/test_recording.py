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
