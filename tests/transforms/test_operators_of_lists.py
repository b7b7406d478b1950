"""Operators of torch.library that take a list of tensors, with a formula of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc


@torch.library.custom_op("tsfunc_tests::scaled_cat", mutates_args=())
def scaled_cat(parts: Sequence[Tensor], factor: float) -> Tensor:
    return torch.cat([part * factor for part in parts])


@scaled_cat.register_fake
def _(parts: Sequence[Tensor], factor: float) -> Tensor:
    return torch.cat([part * factor for part in parts])


def _setup_context(ctx: Any, inputs: tuple[Sequence[Tensor], float], output: Tensor) -> None:
    parts, ctx.factor = inputs
    ctx.sizes = [part.shape[0] for part in parts]


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    return list((grad * ctx.factor).split(ctx.sizes)), None


scaled_cat.register_autograd(_backward, setup_context=_setup_context)


def f(x: Tensor) -> Tensor:
    return scaled_cat([x, x[1:].sin()], 2.0).sin().sum()


def plain(x: Tensor) -> Tensor:
    return (torch.cat([x, x[1:].sin()]) * 2.0).sin().sum()


CALLS: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "grad": tsfunc.grad,
    "vmap(grad)": lambda f: lambda x: tsfunc.vmap(tsfunc.grad(f))(torch.stack([x, x.cos()])),
    "specialize(grad)": lambda f: tsfunc.specialize(tsfunc.grad(f)),
    "grad(specialize)": lambda f: tsfunc.grad(tsfunc.specialize(f)),
    "specialize(vmap(grad))": lambda f: tsfunc.specialize(
        lambda x: tsfunc.vmap(tsfunc.grad(f))(torch.stack([x, x.cos()]))
    ),
    "jacrev(specialize(grad))": lambda f: tsfunc.jacrev(tsfunc.specialize(tsfunc.grad(f))),
}


@pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_are_those_of_the_formula(name: str) -> None:
    call = CALLS[name](f)
    for size in (3, 3, 5):  # a program runs again
        x = torch.randn(size, dtype=torch.float64)
        torch.testing.assert_close(call(x), CALLS[name](plain)(x))
