"""Derivatives of functions that are differentiable once: the second is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tsfunc
from tsfunc.errors import UndefinedDerivativeError

W = torch.arange(4.0).cos()
S = torch.tensor(0.7)


class Once(torch.autograd.Function):
    """A function with a derivative that can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert len(ctx.needs_input_grad) >= 2 and not torch.is_grad_enabled()
        return g * ctx.power * x ** (ctx.power - 1), None


class OnceWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    backward = Once.backward  # type: ignore[assignment]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _power: Any) -> Any:
        (x,) = ctx.saved_tensors
        return tangent * ctx.power * x ** (ctx.power - 1)


class OnceWithVmap(OnceWithSetup):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, power: int) -> Any:
        return OnceWithVmap.apply(x, power), in_dims[0]  # type: ignore[no-untyped-call]


ONCE = pytest.mark.parametrize("cls", [Once, OnceWithSetup, OnceWithVmap])


@ONCE
def test_functions_that_are_differentiable_once(cls: Any) -> None:
    def f(x: Tensor) -> Any:
        return cls.apply(x, 3).sum()

    slope = 3 * W**2
    for found in (
        tsfunc.grad(f)(W),
        tsfunc.vmap(tsfunc.grad(f))(W),
        tsfunc.grad(lambda w: tsfunc.vmap(f)(w).sum())(W),
        tsfunc.jacrev(tsfunc.vmap(f))(W).diagonal(),
        tsfunc.specialize(tsfunc.vmap(tsfunc.grad(f)))(W),
        tsfunc.vmap(tsfunc.grad(tsfunc.specialize(f)))(W),
    ):
        torch.testing.assert_close(found, slope)
    if cls is not Once:
        torch.testing.assert_close(tsfunc.vmap(tsfunc.jacfwd(f))(W), slope)


def _tangent(f: Any) -> Any:
    return lambda x: tsfunc.jvp(f, (x,), (torch.ones_like(x),))[1].sum()


@ONCE
@pytest.mark.parametrize(
    "name", ["grad(grad)", "jvp(grad)", "grad(jvp)", "hessian", "jacrev(vmap)"]
)
def test_a_second_derivative_of_those_is_an_error(cls: Any, name: str) -> None:
    def f(x: Tensor) -> Any:
        return cls.apply(x, 3).sum()

    slope = tsfunc.grad(f)
    twice: Any = {
        "grad(grad)": tsfunc.grad(slope),
        "jvp(grad)": _tangent(slope),
        "grad(jvp)": tsfunc.grad(_tangent(f)),
        "hessian": tsfunc.hessian(f),
        "jacrev(vmap)": tsfunc.jacrev(lambda s: tsfunc.vmap(slope)(s.expand(3))),
    }[name]
    if cls is not Once and name == "grad(jvp)":  # its jvp is differentiable
        torch.testing.assert_close(twice(S), 6 * S)
        return
    for run in (twice, tsfunc.specialize(twice), lambda s: tsfunc.vmap(twice)(s.expand(2))):
        with pytest.raises(
            UndefinedDerivativeError, match=rf"^{cls.__name__}: .*differentiate twice"
        ):
            run(S)
    assert tsfunc.grad(f)(S).isfinite()


def test_forward_mode_of_those_without_a_jvp_is_an_error() -> None:
    with pytest.raises(UndefinedDerivativeError, match=r"^Once: .*nor a forward mode"):
        _tangent(lambda x: Once.apply(x, 3))(S)  # type: ignore[no-untyped-call]
