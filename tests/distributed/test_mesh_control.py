"""Choices and loops in bodies that exchange values agree with vmap, and no rank waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tsfunc
from tests.distributed.checks import Check, Checks
from tsfunc import P, VirtualMesh, shard_map

close = torch.testing.assert_close


def psum(x: Tensor) -> Tensor:
    return tsfunc.psum(x, "i")


def choose(x: Tensor) -> Any:
    return tsfunc.cond(x.sum() > 0, lambda x: x * psum(x.sin()), lambda x: x.exp() - psum(x), x)


def choose_alone(x: Tensor) -> Any:
    return psum(tsfunc.cond(x.sum() > 0, torch.exp, torch.cos, x))


def choose_of_three(x: Tensor) -> Any:
    at = (x.sum() > 0).long() + (x.sum() > 5).long()
    return tsfunc.switch(at, [psum, lambda x: x * psum(x), lambda x: psum(x.cos())], x)


def grow(x: Tensor) -> Any:
    return tsfunc.while_loop(lambda x: x.sum() < 20, lambda x: x + 1 + psum(x.sin()).abs(), x)


def count(x: Tensor) -> Any:
    steps = (x.sum() > 0).long() + 1
    return tsfunc.fori_loop(0, steps, lambda k, x: x + k + psum(x.sin()), x)


def choose_in_loop(x: Tensor) -> Any:
    def step(carry: Tensor, t: Tensor) -> Any:
        carry = tsfunc.cond(carry.sum() > t, lambda c: c - psum(c.sin()), lambda c: c + 1, carry)
        return carry, carry.sum()

    return tsfunc.scan(step, x, torch.arange(3.0, dtype=x.dtype))[0]


def choose_by_example(x: Tensor) -> Any:
    def one(v: Tensor) -> Any:
        return tsfunc.cond(v > 0, lambda v: v * psum(v.sin()), lambda v: psum(v), v)

    return tsfunc.vmap(one)(x)


def loop_by_example(x: Tensor) -> Any:
    def one(v: Tensor) -> Any:
        return tsfunc.while_loop(lambda v: v < 4, lambda v: v + 1 + psum(v.sin()).abs(), v)

    return tsfunc.vmap(one)(x)


BODIES: dict[str, Callable[[Tensor], Any]] = {
    "cond": choose, "cond without exchange": choose_alone, "switch": choose_of_three,
    "while_loop": grow, "fori_loop": count, "cond in scan": choose_in_loop,
    "cond by example": choose_by_example, "while_loop by example": loop_by_example,
}  # fmt: skip


def over_vmap(body: Callable[[Tensor], Any], size: int) -> Callable[[Tensor], Any]:
    mapped = tsfunc.vmap(body, axis_name="i")
    return lambda x: mapped(x.unflatten(0, (size, 3))).flatten(0, 1)


def loss(x: Tensor, f: Callable[[Tensor], Any]) -> Any:
    return f(x).square().sum()


def same_as_vmap(body: Callable[[Tensor], Any]) -> Check:
    def run(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
        for shift in (-3.0, 0.0, 3.0):  # ranks that choose alike, and ranks that differ
            x = torch.linspace(-1.0, 2.0, 3 * size, dtype=torch.float64) + shift
            want = over_vmap(body, size)(x)
            slope = tsfunc.grad(loss)(x, over_vmap(body, size))
            for which in (mesh, VirtualMesh(i=size)):
                f = shard_map(body, which, P("i"), P("i"))
                close(f(x), want)
                close(tsfunc.grad(loss)(x, f), slope)
            f = shard_map(body, mesh, P("i"), P("i"))
            close(tsfunc.specialize(f)(x), want)

    return run


CHECKS = Checks((name, same_as_vmap(body)) for name, body in BODIES.items())


test_on_two_ranks = CHECKS.tests()
