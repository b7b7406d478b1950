"""A call of a transform leaves no reference cycles, so that its arguments are freed at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tsfunc import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

Function = Callable[..., Any]


def energy(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum(-1)


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap": vmap,
    "grad": lambda f: lambda x: grad(lambda y: f(y).sum())(x),
    "grad_and_value": lambda f: lambda x: grad_and_value(lambda y: f(y).sum())(x),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "vjp": lambda f: lambda x: vjp(f, x)[1](f(x)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),)),
    "vmap(grad)": lambda f: vmap(grad(lambda y: f(y).sum())),
    "vmap(hessian)": lambda f: vmap(hessian(f)),
    "vmap(vmap)": lambda f: vmap(lambda x: vmap(lambda y: f(x * y))(x)),
}


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.usefixtures("without_collections")
def test_arguments_and_captured_tensors_are_freed_at_once(name: str) -> None:
    def called_once() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        x, captured = torch.randn(3, 3), torch.randn(3)
        TRANSFORMS[name](lambda y: energy(y + captured))(x)
        return weakref.ref(x), weakref.ref(captured)

    called_once()  # torch's first calls in forward mode keep the frames of their callers
    assert [ref() for ref in called_once()] == [None, None]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.usefixtures("without_collections")
def test_calls_leave_nothing_to_collect(name: str) -> None:
    function = TRANSFORMS[name](energy)
    x = torch.randn(3, 3)
    for _ in range(5):
        function(x)
    gc.collect()
    function(x)
    assert gc.collect() == 0


@pytest.mark.usefixtures("without_collections")
def test_nested_jacobians_leave_nothing_to_collect() -> None:
    function, x = vmap(jacrev(energy)), torch.randn(3, 2, 3)
    for _ in range(5):
        function(x)
    gc.collect()
    function(x)
    assert gc.collect() == 0
