"""Pullbacks and pushforwards that are called in a program, or in a body of control flow.

They are made outside of it, by the function or before its call. The result, and its derivatives,
are those of a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import tsfunc
from tsfunc.errors import DataDependentError

Function = Callable[[Tensor], Tensor]

X, Y, W = torch.randn(3, 3, dtype=torch.float64)


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * tangent


CUBED: Any = Cubed.apply


def curved(y: Tensor) -> Tensor:
    return (y.sin() * y.flip(0)).cumsum(0)


FUNCTIONS: dict[str, Function] = {
    "linear": lambda y: y * -2,
    "curved": curved,
    "checkpoint": tsfunc.checkpoint(curved),
    "specialize": tsfunc.specialize(curved),
    "Function": lambda y: CUBED(y).sin(),
    "cond": lambda y: tsfunc.cond(y.sum() > 0, curved, torch.cos, y),
    "scan": lambda y: tsfunc.scan(lambda c, x: ((c * x).sin() + x, c), y[0], y)[1],
    "torch's checkpoint": lambda y: torch.utils.checkpoint.checkpoint(
        curved, y, use_reentrant=False
    ),
}


def pullback(f: Function, y: Tensor) -> Function:
    pull = tsfunc.vjp(f, y)[1]
    return lambda x: pull(x)[0]


def pushforward(f: Function, y: Tensor) -> Function:
    push: Function = tsfunc.linearize(f, y)[1]
    return push


MAPS: dict[str, Callable[[Function, Tensor], Function]] = {
    "vjp": pullback,
    "linearize": pushforward,
}
USES: dict[str, Callable[[Function], Function]] = {
    "specialize": tsfunc.specialize,
    "checkpoint": tsfunc.checkpoint,
    "map": lambda linear: lambda x: tsfunc.map(linear, torch.stack([x, x.sin()]))[0],
    "cond": lambda linear: lambda x: tsfunc.cond(x.sum() < 9, linear, torch.sin, x),
    "fori_loop": lambda linear: lambda x: tsfunc.fori_loop(0, 1, lambda _, y: linear(y), x),
    "vmap": lambda linear: lambda x: tsfunc.vmap(linear)(x[None])[0],
}
OUTER: dict[str, Callable[[Function], Function]] = {
    "call": lambda f: f,
    "specialize": tsfunc.specialize,
    "grad": lambda f: tsfunc.grad(lambda x: f(x).sin().sum()),
    "specialize of grad": lambda f: tsfunc.specialize(tsfunc.grad(lambda x: f(x).sin().sum())),
    "grad of specialize": lambda f: tsfunc.grad(tsfunc.specialize(lambda x: f(x).sin().sum())),
    "jvp": lambda f: lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1],
}


@pytest.mark.parametrize("made", MAPS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("use", USES)
def test_a_captured_linear_map_is_that_of_a_plain_call(use: str, name: str, made: str) -> None:
    function = FUNCTIONS[name]
    plain = curved if "checkpoint" in name or name == "specialize" else function

    def inside(f: Function, wrapped: Callable[[Function], Function]) -> Function:
        return lambda x: wrapped(MAPS[made](f, x))(x * W)

    def outside(f: Function, wrapped: Callable[[Function], Function]) -> Function:
        linear = wrapped(MAPS[made](f, Y))
        return lambda x: linear(x * W)

    for of in (inside, outside):
        expected = of(plain, lambda linear: linear)
        for outer in OUTER.values():
            torch.testing.assert_close(outer(of(function, USES[use]))(X), outer(expected)(X))


@pytest.mark.parametrize("made", MAPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backward_pass_reaches_the_argument_of_a_captured_linear_map(
    name: str, made: str
) -> None:
    linear = MAPS[made](FUNCTIONS[name], Y)
    for use in USES.values():
        leaf, other = X.clone().requires_grad_(), X.clone().requires_grad_()
        linear(leaf).sin().sum().backward()
        use(linear)(other).sin().sum().backward()
        torch.testing.assert_close(other.grad, leaf.grad)
        assert not use(linear)(X).requires_grad


class Padded(torch.autograd.Function):
    """Its rules make tensors and write into them."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = torch.zeros(x.shape, dtype=x.dtype)
        result[:] = grad * x.cos()
        return result + torch.zeros_like(x)


PADDED: Any = Padded.apply
# Their derivatives are formulas in C++ that compute with saved values alone, or make tensors.
WITH_FORMULAS: dict[str, Function] = {
    "prod": lambda y: y.prod() + y[1:].sin(),
    "prod of zero": lambda y: (y * torch.tensor([1.0, 0.0, 1.0])).prod() * y,
    "norm": lambda y: y.norm(p=3) * y.sin(),
    "vector_norm": lambda y: torch.linalg.vector_norm(y.expand(2, 3), ord=2.5, dim=1),
    "cumprod": lambda y: y.cumprod(0),
    "logcumsumexp": lambda y: y.logcumsumexp(0),
    "amax": lambda y: y.amax() * y,
    "median": lambda y: y.median() * y,
    "index_put": lambda y: y.index_put((torch.tensor([0, 0]),), y[1:], accumulate=True),
    "unfold": lambda y: y.unfold(0, 2, 1),
    "slogdet": lambda y: torch.linalg.slogdet(torch.outer(y, y) + torch.diag(y.exp()))[1],
    "pool": lambda y: torch.nn.functional.max_pool1d(y[None], 2, 1),
    "Function": lambda y: PADDED(y) * y,
}


@pytest.mark.parametrize("name", WITH_FORMULAS)
def test_tensors_that_a_backward_formula_makes_have_their_values(name: str) -> None:
    value, pull = tsfunc.vjp(WITH_FORMULAS[name], Y)
    program = tsfunc.specialize(pull)
    cotangents = torch.randn(3, *value.shape, dtype=torch.float64)
    expected = torch.stack([pull(ct)[0] for ct in cotangents])
    results = torch.stack([program(ct)[0] for ct in cotangents])
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(tsfunc.vmap(tsfunc.specialize(pull))(cotangents)[0], expected)


@pytest.mark.parametrize("made", MAPS)
@pytest.mark.parametrize("outer", ["call", "jvp"])
def test_a_map_through_branches_of_examples_is_not_for_a_program(outer: str, made: str) -> None:
    """The sizes of the branches are data of an earlier call; a program with the branch has none."""

    def branch(y: Tensor) -> Tensor:
        return tsfunc.cond(y.sum() > 0, curved, torch.cos, y)

    def captured(y: Tensor, x: Tensor) -> Tensor:
        return tsfunc.specialize(MAPS[made](branch, y))(x)

    def inside(y: Tensor, x: Tensor) -> Tensor:
        return tsfunc.specialize(lambda y, x: MAPS[made](branch, y)(x))(y, x)

    def plain(y: Tensor, x: Tensor) -> Tensor:
        return MAPS[made](curved if y.sum() > 0 else torch.cos, y)(x)

    def derived(f: Any) -> Callable[[Tensor, Tensor], Tensor]:
        if outer == "call":
            return f
        return lambda y, x: tsfunc.jvp(f, (y, x), (y.cos(), x.sin()))[1]

    ys, xs = torch.randn(2, 6, 3, dtype=torch.float64)
    ys[0], ys[1] = ys[0].abs(), -ys[1].abs()
    expected = torch.stack([derived(plain)(y, x) for y, x in zip(ys, xs, strict=True)])
    torch.testing.assert_close(derived(tsfunc.vmap(inside))(ys, xs), expected)
    with pytest.raises(DataDependentError, match="Call vjp or linearize inside"):
        derived(tsfunc.vmap(captured))(ys, xs)
