"""Results of custom functions, checkpoints and branches that are expanded tensors.

Forward mode gives a tangent the strides of its primal, which fails for an expanded one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import tsfunc

Map = Callable[[Tensor], Tensor]


def expanded(x: Tensor) -> Tensor:
    return x.sin().sum().expand(3)


def dense(x: Tensor) -> Tensor:
    return torch.stack([x.sin().sum()] * 3)


def _custom_jvp() -> Map:
    custom: Any = tsfunc.custom_jvp(expanded)
    custom.defjvp(
        lambda primals, tangents: (expanded(*primals), tsfunc.jvp(dense, primals, tangents)[1])
    )
    return custom


def _custom_vjp() -> Map:
    custom: Any = tsfunc.custom_vjp(expanded)
    custom.defvjp(
        lambda x: (expanded(x), x), lambda x, cotangent: tsfunc.vjp(dense, x)[1](cotangent)
    )
    return custom


def _custom_vmap() -> Map:
    custom: Any = tsfunc.custom_vmap(expanded)
    custom.def_vmap(lambda size, batched, x: (tsfunc.vmap(expanded)(x), True))
    return custom


def _custom_gradient() -> Map:
    return tsfunc.custom_gradient(
        lambda x: (expanded(x), lambda cotangent: tsfunc.vjp(dense, x)[1](cotangent))
    )


class _SetUp(Function):
    """The backward uses a saved result: each of its elements is the sum of the sines."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return expanded(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return x.cos() * cotangent.sum() * (1 + out[0] - x.sin().sum())

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return torch.stack([(x.cos() * tangent).sum() * (1 + out[0] - x.sin().sum())] * 3)


class _WithContext(Function):
    """The same rule, with a ctx in ``forward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = expanded(x)
        ctx.save_for_backward(x, out)
        ctx.save_for_forward(x, out)
        return out

    backward = _SetUp.backward
    jvp = _SetUp.jvp


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vmap": _custom_vmap,
    "custom_gradient": _custom_gradient,
    "Function with setup_context": lambda: _SetUp.apply,
    "Function with a ctx": lambda: _WithContext.apply,
    "checkpoint": lambda: tsfunc.checkpoint(expanded),
    "cond": lambda: lambda x: tsfunc.cond(x.sum() > -9, expanded, dense, x),
}


def _total(f: Map) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).sin().sum()


def _two(x: Tensor) -> Tensor:
    return torch.stack([x, x * 2])


TOWERS: dict[str, Callable[[Map], Callable[[Tensor], Any]]] = {
    "jvp": lambda f: lambda x: tsfunc.jvp(f, (x,), (x.cos(),)),
    "jacfwd": lambda f: tsfunc.jacfwd(f),
    "vmap(jvp)": lambda f: (
        lambda x: tsfunc.vmap(lambda x: tsfunc.jvp(f, (x,), (x.cos(),)))(_two(x))
    ),
    "jvp(vmap)": lambda f: lambda x: tsfunc.jvp(tsfunc.vmap(f), (_two(x),), (_two(x.cos()),)),
    "jacfwd(grad)": lambda f: tsfunc.jacfwd(tsfunc.grad(_total(f))),
    "grad(jvp)": lambda f: tsfunc.grad(_total(lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1])),
    "grad(jvp(vmap))": lambda f: tsfunc.grad(
        _total(lambda x: tsfunc.jvp(tsfunc.vmap(f), (_two(x),), (_two(x.cos()),))[1])
    ),
    "jvp(jvp)": lambda f: (
        lambda x: tsfunc.jvp(lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1], (x,), (x.exp(),))
    ),
    "hvp": lambda f: lambda x: tsfunc.hvp(_total(f), (x,), (x.cos(),)),
}


@pytest.mark.parametrize("program", [False, True], ids=["eager", "program"])
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_of_expanded_results(function: str, tower: str, program: bool) -> None:
    """The derivatives are those of the same function with a dense result."""
    x = torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    f = TOWERS[tower](FUNCTIONS[function]())
    got = (tsfunc.specialize(f) if program else f)(x)
    torch.testing.assert_close(got, TOWERS[tower](dense)(x))
