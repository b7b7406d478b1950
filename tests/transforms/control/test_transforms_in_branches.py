"""Transforms inside of branches and steps that some examples of nested vmaps take, and the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import func as torch_func

import tsfunc
from tsfunc import cond, specialize, switch, vmap, while_loop

Function = Callable[[Tensor], Tensor]


def pulled(api: Any, g: Function, x: Tensor, t: Tensor) -> Tensor:
    result: Tensor = api.vjp(g, x)[1](t)[0]
    return result


def pushed(api: Any, g: Function, x: Tensor, t: Tensor) -> Tensor:
    result: Tensor = api.jvp(g, (x,), (t,))[1]
    return result


def gradient(api: Any, g: Function, x: Tensor, t: Tensor) -> Tensor:
    result: Tensor = api.grad(lambda x: (g(x) * t).sum())(x)
    return result


def curvature(api: Any, g: Function, x: Tensor, t: Tensor) -> Tensor:
    result: Tensor = api.hessian(lambda x: (g(x) * t).sum())(x).sum(0)
    return result


def rows(api: Any, g: Function, x: Tensor, t: Tensor) -> Tensor:
    result: Tensor = api.jacrev(g)(x) @ t
    return result


TRANSFORMS = [pulled, pushed, gradient, curvature, rows]
CONSTANT = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64)


class Drawn:
    """A function of an example of each of two vmaps, and of a tensor that they share.

    Its choice depends on one of the examples or on both, and a branch calls transforms of functions
    of each of the tensors.
    """

    def __init__(self, rng: random.Random) -> None:
        names = ["constant", "a", "b", "shared"]
        self.form = rng.choice(["cond", "switch", "while_loop"])
        self.by = rng.choice(["a", "b", "ab"]), rng.choice(["a", "b", "ab"])
        self.nested = rng.random() < 0.5
        self.calls = [
            (rng.choice(TRANSFORMS), rng.choices(names, k=3), rng.random() < 0.5) for _ in range(3)
        ]

    def __call__(self, api: Any, a: Tensor, b: Tensor, shared: Tensor) -> Tensor:
        env = {"constant": CONSTANT, "a": a, "b": b, "shared": shared}
        first, second = (sum((env[name] for name in by), CONSTANT * 0).sum() for by in self.by)
        loops = api is torch_func  # the reference is called for one example

        def call(i: int) -> Tensor:
            transform, (at, direction, captured), linear = self.calls[i]
            g: Function = lambda p: p * 1 if linear else (p * env[captured]).sin() * p  # noqa: E731
            return transform(api, g, env[at], env[direction])

        def left() -> Tensor:
            if not self.nested:
                return call(0) + a + b
            if loops:
                return call(0) + (call(1) if second > 0 else a * 2) + b
            return call(0) + cond(second > 0, lambda: call(1), lambda: a * 2) + b

        def right() -> Tensor:
            return call(2) * b + a

        def middle() -> Tensor:
            return a * b + shared

        if self.form == "switch":
            index = (first * 3).abs().long() % 3
            branches = [left, middle, right]
            return branches[int(index)]() if loops else switch(index, branches)
        if self.form == "while_loop":
            steps = 1 + (first > 0).long()
            if loops:
                value = a + b
                for _ in range(int(steps)):
                    value = value * 0.5 + left()
                return value
            return while_loop(
                lambda carry: carry[0] < steps,
                lambda carry: (carry[0] + 1, carry[1] * 0.5 + left()),
                (torch.zeros((), dtype=torch.long), a + b),
            )[1]
        if loops:
            return left() if first > 0 else right()
        return cond(first > 0, left, right)


AROUND: dict[str, Callable[[Any, Callable[..., Tensor], Tensor], Tensor]] = {
    "call": lambda api, f, x: f(x),
    "program": lambda api, f, x: f(x) if api is torch_func else specialize(f)(x),
    "grad": lambda api, f, x: api.grad(lambda x: f(x).sin().sum())(x),
    "jvp": lambda api, f, x: api.jvp(f, (x,), (CONSTANT,))[1],
}


@pytest.mark.parametrize("around", AROUND)
def test_nested_vmaps_are_the_loop(around: str) -> None:
    seed = random.randrange(10**6)
    for number in range(4):
        print("seed", f"{seed}/{number}")
        rng = random.Random(f"{seed}/{number}")
        drawn = Drawn(rng)
        torch.manual_seed(rng.randrange(10**6))
        xs, ys = torch.randn(2, 3).double(), torch.randn(3, 4).double()
        shared = torch.randn(3).double()

        def mapped(x: Tensor, drawn: Drawn = drawn, xs: Tensor = xs, ys: Tensor = ys) -> Tensor:
            inner = vmap(lambda a, b: drawn(tsfunc, a, b, x), in_dims=(None, 1))
            return vmap(inner, in_dims=(0, None))(xs, ys)

        def looped(x: Tensor, drawn: Drawn = drawn, xs: Tensor = xs, ys: Tensor = ys) -> Tensor:
            each = [[drawn(torch_func, a, b, x) for b in ys.unbind(1)] for a in xs]
            return torch.stack([torch.stack(row) for row in each])

        found = AROUND[around](tsfunc, mapped, shared)
        torch.testing.assert_close(found, AROUND[around](torch_func, looped, shared))


@pytest.mark.parametrize("linear", [True, False])
def test_a_pullback_made_where_the_examples_of_two_vmaps_diverge(linear: bool) -> None:
    def f(x: Tensor) -> Tensor:
        def made() -> Tensor:
            _, pull = tsfunc.vjp(lambda p: p * 1 if linear else p.sin(), CONSTANT)
            return x + pull(CONSTANT)[0].sum()

        return cond(x > 0, made, lambda: -x)

    x = torch.tensor([[1.0, -1], [-1, 1]], dtype=torch.float64)
    pulled = (CONSTANT if linear else CONSTANT.cos() * CONSTANT).sum()
    torch.testing.assert_close(vmap(vmap(f))(x), torch.where(x > 0, x + pulled, -x))
