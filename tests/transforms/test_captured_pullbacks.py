"""Pullbacks and linear maps that are made outside of a transform and called inside of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc

# torch.func loads the forward formulas of torch, which its scripts compile.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

Function = Callable[[Tensor], Tensor]

X, Y, W = torch.randn(3, 3, dtype=torch.float64)


def curved(y: Tensor) -> Tensor:
    return (y.sin() * y.flip(0)).cumsum(0)


def pullback(api: Any, point: Tensor) -> Function:
    pull = api.vjp(curved, point)[1]
    return lambda x: pull(x)[0]


def pushforward(api: Any, point: Tensor) -> Function:
    if api is torch.func:  # its linearize compiles the function
        return lambda x: torch.func.jvp(curved, (point,), (x,))[1]
    push: Function = api.linearize(curved, point)[1]
    return push


MAPS: dict[str, Callable[[Any, Tensor], Function]] = {"vjp": pullback, "linearize": pushforward}

TRANSFORMS: dict[str, Callable[[Any, Function], Function]] = {
    "vmap": lambda api, f: lambda x: api.vmap(f)(torch.stack([x, 2 * x])).sum(0),
    "grad": lambda api, f: api.grad(lambda x: f(x).sin().sum()),
    "vjp": lambda api, f: lambda x: api.vjp(f, x)[1](f(x))[0],
    "jvp": lambda api, f: lambda x: api.jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": lambda api, f: lambda x: api.jacfwd(f)(x).flatten(0, -2).sum(0),
    "jacrev": lambda api, f: lambda x: api.jacrev(f)(x).flatten(0, -2).sum(0),
    "hessian": lambda api, f: api.hessian(lambda x: f(x).sin().sum()),
}
TOWERS = [
    *itertools.product(TRANSFORMS),
    *itertools.product(TRANSFORMS, repeat=2),
    ("vmap", "grad", "vmap"), ("jacfwd", "vmap", "grad"), ("vmap", "jacfwd", "jacrev"),
    ("vmap", "vmap", "hessian"), ("jvp", "jvp", "vmap"), ("grad", "vmap", "grad"),
]  # fmt: skip


def under(tower: tuple[str, ...], api: Any, f: Function) -> Function:
    for name in reversed(tower):
        f = TRANSFORMS[name](api, f)
    return f


@pytest.mark.parametrize("made", MAPS)
@pytest.mark.parametrize("tower", TOWERS, ids="-".join)
def test_results_require_grad_as_those_of_torch_func(tower: tuple[str, ...], made: str) -> None:
    def result(api: Any) -> Tensor:
        linear = MAPS[made](api, Y)
        return under(tower, api, lambda x: linear(x) * x)(X)

    out, expected = result(tsfunc), result(torch.func)
    torch.testing.assert_close(out, expected)
    assert not expected.requires_grad and not out.requires_grad


@pytest.mark.parametrize("made", MAPS)
@pytest.mark.parametrize("tower", [(), *TOWERS], ids="-".join)
def test_backward_reaches_captured_tensors_at_every_call(tower: tuple[str, ...], made: str) -> None:
    def gradients(api: Any) -> list[Tensor]:
        linear = MAPS[made](api, Y)
        leaf = W.clone().requires_grad_()
        function = under(tower, api, lambda x: linear(x * leaf) * x)
        found = []
        for _ in range(2):
            function(X).sin().sum().backward()
            assert leaf.grad is not None
            found.append(leaf.grad.clone())
        return found

    torch.testing.assert_close(gradients(tsfunc), gradients(torch.func))


@pytest.mark.parametrize("tower", [(), *TOWERS[: len(TRANSFORMS)], ("vmap", "grad")], ids="-".join)
def test_backward_reaches_what_the_function_of_a_pullback_captures(tower: tuple[str, ...]) -> None:
    def gradient(api: Any) -> Tensor | None:
        leaf = W.clone().requires_grad_()
        pull = api.vjp(lambda y: curved(y) * leaf.sin(), Y)[1]
        out = under(tower, api, lambda x: pull(x)[0] * x)(X)
        out.sin().sum().backward()
        return leaf.grad

    torch.testing.assert_close(gradient(tsfunc), gradient(torch.func))


def test_the_transpose_of_a_linear_function_is_differentiated_by_its_argument() -> None:
    transposed = tsfunc.linear_transpose(lambda x: x.cumsum(0) * W, X)
    leaf = X.clone().requires_grad_()
    for _ in range(2):
        transposed(leaf.sin())[0].sin().sum().backward()
    expected = tsfunc.grad(lambda x: (x.sin() * W).flip(0).cumsum(0).flip(0).sin().sum())(X)
    torch.testing.assert_close(leaf.grad, 2 * expected)
    assert not tsfunc.vmap(tsfunc.grad(lambda x: transposed(x)[0].sin().sum()))(
        X[None]
    ).requires_grad


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: tsfunc.grad(f)(X),
        lambda f: tsfunc.value_and_grad(f)(X)[1],
        lambda f: tsfunc.vjp(f, X)[1](torch.ones((), dtype=X.dtype))[0],
        lambda f: tsfunc.grad(lambda x: tsfunc.grad(f)(x).sin().sum())(X),
        lambda f: tsfunc.hvp(f, (X,), (Y,))[1],
        lambda f: tsfunc.linearize(f, X)[1](Y),
    ],
    ids=["grad", "value_and_grad", "vjp", "grad of grad", "hvp", "linearize"],
)
def test_a_derivative_is_a_term_of_a_loss(derivative: Callable[[Function], Tensor]) -> None:
    """The derivative depends on the parameters, and on the point that it is taken at."""
    leaf = W.clone().requires_grad_()

    def result() -> Tensor:
        return derivative(lambda x: (x * leaf).sin().prod()).cos().sum()

    (expected,) = torch.autograd.grad(result(), leaf)
    result().backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_rules_differentiate_by_saved_values_after_the_transform_has_ended() -> None:
    """The rule of a root takes pullbacks in the backward pass of a captured pullback."""

    def root(x: Tensor) -> Tensor:
        def newton(f: Function, z: Tensor) -> Tensor:
            return tsfunc.fori_loop(0, 25, lambda _, z: z - f(z) / (3 * z * z + 1), z)

        return tsfunc.implicit_root(lambda z: z**3 + z - x, torch.ones_like(x), newton)

    slope = tsfunc.grad(lambda x: root(x).sin().sum())
    (pulled,) = tsfunc.vjp(slope, X)[1](torch.ones_like(X))
    z = root(X)
    first = 1 / (3 * z * z + 1)
    torch.testing.assert_close(pulled, -6 * z * first**3 * z.cos() - first**2 * z.sin())


SLOPE = tsfunc.grad(lambda y: curved(y).prod())
INNER: dict[str, Function] = {
    "linearize": lambda x: tsfunc.linearize(curved, x)[1](Y),
    "vjp": lambda x: tsfunc.vjp(curved, x)[1](Y)[0],
    "grad of linearize": tsfunc.grad(lambda x: tsfunc.linearize(curved, x)[1](Y).sin().sum()),
    "linearize of grad": lambda x: tsfunc.linearize(SLOPE, x)[1](Y),
}


@pytest.mark.parametrize("name", INNER)
def test_results_of_jvp_have_no_graph_of_derivatives_inside(name: str) -> None:
    out, tangent = tsfunc.jvp(INNER[name], (X,), (Y,))
    assert not out.requires_grad and not tangent.requires_grad
    torch.testing.assert_close(tangent, tsfunc.jacrev(INNER[name])(X) @ Y)
    leaf = X.clone().requires_grad_()
    assert tsfunc.jvp(INNER[name], (leaf,), (Y,))[1].requires_grad
