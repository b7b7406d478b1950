"""Tangents and cotangents of custom functions that depend on what an outer transform maps.

The law: a custom function whose rules are the true derivatives is the function itself. (In torch
2.13 and 2.14, torch.func's jvp of a jvp loses these tangents of an autograd.Function.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tsfunc import custom_jvp, custom_vjp, grad, jvp, linearize, specialize, vjp, vmap

Function = Callable[[Tensor], Any]

each = pytest.mark.parametrize


def plain(x: Tensor) -> Tensor:
    return x.sin() * x


class Rules(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return plain(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.cos() * x + x.sin())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (x,) = ctx.saved_tensors
        return tangents[0] * (x.cos() * x + x.sin())


def by_jvp(x: Tensor) -> Any:
    function: Any = custom_jvp(plain)
    function.defjvp(lambda primals, tangents: jvp(plain, primals, tangents))
    return function(x)


def by_vjp(x: Tensor) -> Any:
    function: Any = custom_vjp(plain)
    function.defvjp(lambda x: (plain(x), x), lambda x, ct: vjp(plain, x)[1](ct))
    return function(x)


FUNCTIONS: dict[str, Function] = {
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "autograd.Function": Rules.apply,
}

VJP: Any = vjp
INNER: dict[str, Callable[[Function, Tensor, Tensor], Any]] = {
    "jvp": lambda f, x, t: jvp(f, (x,), (t,)),
    "vjp": lambda f, x, t: VJP(f, x)[1](t)[0],
    "linearize": lambda f, x, t: linearize(f, x)[1](t),
    "jvp of jvp": lambda f, x, t: jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,)),
    "jvp of vjp": lambda f, x, t: jvp(lambda x: VJP(f, x)[1](t)[0], (x,), (t,)),
    "vjp of jvp": lambda f, x, t: VJP(lambda x: jvp(f, (x,), (t,))[1], x)[1](t)[0],
}

Outer = Callable[[Function, Tensor], Any]
OUTER: dict[str, Outer] = {
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "grad": lambda f, x: grad(lambda x: sum(leaf.sin().sum() for leaf in tree_leaves(f(x))))(x),
    "vmap of jvp": lambda f, x: vmap(lambda x: jvp(f, (x,), (x.cos(),)))(torch.stack([x, x.exp()])),
    "jvp of vmap": lambda f, x: jvp(
        vmap(f, -1), (torch.stack([x, x.exp()], -1),), (x.new_ones(3, 2),)
    ),
    "jvp of jvp": lambda f, x: jvp(lambda x: jvp(f, (x,), (x.sin(),)), (x,), (x.cos(),)),
}


@each("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
@each("by", ["primal", "tangent", "both"])
@each("outer", OUTER)
@each("inner", INNER)
@each("name", FUNCTIONS)
def test_a_custom_function_is_its_function(
    name: str, inner: str, outer: str, by: str, wrap: Callable[[Function], Function]
) -> None:
    x, other = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def derivative(function: Function, wrap: Callable[[Function], Function]) -> Any:
        def mapped(x: Tensor) -> Any:
            primal = other if by == "tangent" else x
            tangent = other if by == "primal" else x
            return wrap(lambda primal: INNER[inner](function, primal, tangent))(primal)

        return OUTER[outer](mapped, x)

    want = derivative(plain, lambda f: f)
    torch.testing.assert_close(derivative(FUNCTIONS[name], wrap), want)
