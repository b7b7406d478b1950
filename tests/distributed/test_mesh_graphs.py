"""Random graphs of collectives over two axes, with choices and loops, agree with a VirtualMesh."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.distributed.checks import Check, failures, mesh_of, watched
from tsfunc import P, VirtualMesh, shard_map

Step = Callable[[Tensor, Tensor], Any]


def steps(draw: random.Random, depth: int) -> Step:
    """Return a random function of two values of one shape that exchanges them over axes."""
    axis = draw.choice(["a", "b", ("a", "b"), ("b", "a")])
    inner = steps(draw, depth - 1) if depth else None
    other = steps(draw, depth - 1) if depth else None
    kinds = ["psum", "pmax", "gather", "permute", "scatter", "alone"]
    kind = draw.choice([*kinds, "cond", "scan", "while"] if inner is not None else kinds)

    def permuted(x: Tensor) -> Any:
        n = tsfunc.axis_size(axis)
        return tsfunc.ppermute(x, axis, [(k, (k + 1) % n) for k in range(n)])

    def run(x: Tensor, y: Tensor) -> Any:
        if kind == "psum":
            return x * 0.5 + tsfunc.psum(y.sin(), axis)
        if kind == "pmax":
            return x + tsfunc.pmax(y, axis).cos()
        if kind == "gather":
            return y + tsfunc.all_gather(x, axis).sin().mean(0)
        if kind == "permute":
            return permuted(x).sin() * y
        if kind == "scatter":
            return x + tsfunc.psum_scatter(y.sin(), axis, tiled=True).sum()
        if kind == "alone":
            return (x * y).tanh() + tsfunc.axis_index(axis)
        assert inner is not None and other is not None
        if kind == "cond":
            return tsfunc.cond(x.sum() > y.sum(), inner, other, x, y)
        if kind == "scan":
            return tsfunc.scan(lambda c, t: (inner(c, y).tanh() + t, None), x, y[:3])[0]
        count = (x.sum() > 0).long() + 1

        def body(carry: Any) -> Any:
            return carry[0] + 1, inner(carry[1], y).tanh()

        return tsfunc.while_loop(lambda carry: carry[0] < count, body, (count * 0, x))[1]

    return run


def graph(seed: int) -> Callable[[Tensor], Any]:
    draw = random.Random(seed)
    parts = [steps(draw, 2) for _ in range(draw.randint(1, 4))]

    def run(x: Tensor) -> Any:
        y = x.cos()
        for part in parts:
            x, y = y, part(x, y).sin()
        return x + y

    return run


def same_as_virtual(seed: int) -> Check:
    def run(rank: int, size: int) -> None:
        half = 2 if size > 2 else 1 + seed % 2
        shape = (size // half, half)
        mesh = mesh_of(("a", "b"), shape)
        f, spec = graph(seed), P(("a", "b"))
        torch.manual_seed(seed)
        x = torch.randn(size * 4, dtype=torch.float64)
        over = shard_map(f, mesh, spec, spec)
        virtual = shard_map(f, VirtualMesh(a=shape[0], b=shape[1]), spec, spec)
        with watched(120):
            torch.testing.assert_close(over(x), virtual(x))
            slope = tsfunc.grad(lambda x: virtual(x).square().sum())(x)
            torch.testing.assert_close(tsfunc.grad(lambda x: over(x).square().sum())(x), slope)
            torch.testing.assert_close(tsfunc.specialize(over)(x), virtual(x))

    return run


def graphs(count: int) -> dict[str, Check]:
    return {f"graph {seed}": same_as_virtual(seed) for seed in range(count)}


def test_graphs_on_two_ranks() -> None:
    found = failures(graphs(8))
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_graphs(ranks: int) -> None:
    found = failures(graphs(200), ranks, timeout=1800.0)
    assert not any(found.values()), found
