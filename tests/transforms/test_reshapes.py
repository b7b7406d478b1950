"""Writes through ``reshape`` and ``flatten`` under vmap, for every batch dim."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import specialize, vmap


def through_a_reshape(x: Tensor) -> Any:
    y = x.clone()
    y.reshape(-1)[-1:].fill_(100.0)
    return y


def to_the_base(x: Tensor) -> Any:
    y = x * 2
    flat = y.flatten()
    y[0].mul_(3.0)
    return flat * 2


def to_both(x: Tensor) -> Any:
    y = x.sin()
    flat = y.ravel()
    flat[1:].mul_(3.0)
    y.add_(1)
    flat.add_(1)
    return flat, y


def through_two(x: Tensor) -> Any:
    y = x + 1
    y.reshape(-1).reshape(2, -1)[0].zero_()
    return y.sum() + y.prod()


def to_a_copy(x: Tensor) -> Any:
    y = x.clone()
    y.transpose(0, 1).reshape(-1)[0:1].fill_(7.0)
    return y


def after_a_transpose(x: Tensor) -> Any:
    y = x.clone()
    flat = torch.reshape(y, (-1,))
    y.transpose_(0, 1)
    flat.mul_(2.0)
    return y


def of_another_shape(x: Tensor) -> Any:
    y = x * 3
    y.reshape_as(torch.ones(y.numel(), 1))[0] = 0.5
    return y


def without_a_write(x: Tensor) -> Any:
    return (x * 2).reshape(-1) @ torch.arange(float(x.numel()))


FUNCTIONS: list[Callable[[Tensor], Any]] = [
    through_a_reshape, to_the_base, to_both, through_two, to_a_copy, after_a_transpose,
    of_another_shape, without_a_write,
]  # fmt: skip
SHAPES = [(2, 1, 3), (2, 3), (3, 2, 2)]
CASES = [(f, s, d) for f, s in itertools.product(FUNCTIONS, SHAPES) for d in range(len(s) + 1)]


def norm(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: sum((leaf.square().sum() for leaf in optree.tree_leaves(f(x))), x.sum() * 0)


@pytest.mark.parametrize(("f", "shape", "dim"), CASES)
def test_as_the_loop(f: Callable[[Tensor], Any], shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(4, *shape)
    batch = x.movedim(0, dim).contiguous()
    want = optree.tree_map(lambda *parts: torch.stack(parts), *[f(each.clone()) for each in x])
    for mapped in (vmap(f, in_dims=dim), specialize(vmap(f, in_dims=dim))):
        got: Any = mapped(batch)
        torch.testing.assert_close(got, want)
    slope = torch.stack([torch.autograd.functional.jacobian(norm(f), each) for each in x])
    torch.testing.assert_close(vmap(tsfunc.grad(norm(f)), in_dims=dim)(batch), slope)
    total = tsfunc.grad(lambda x: vmap(norm(f), in_dims=dim)(x).sum())
    torch.testing.assert_close(total(batch).movedim(dim, 0), slope)
    pushed = vmap(lambda x: tsfunc.jvp(norm(f), (x,), (x,))[1], in_dims=dim)(batch)
    torch.testing.assert_close(pushed, (slope * x).flatten(1).sum(1))


def test_the_batch_dim_of_an_outer_vmap_lies_between() -> None:
    x = torch.randn(2, 4, 3, 5)
    want = torch.stack([torch.stack([through_a_reshape(b) for b in a.unbind(2)])
                        for a in x.unbind(1)])  # fmt: skip
    torch.testing.assert_close(vmap(vmap(through_a_reshape, in_dims=2), in_dims=1)(x), want)


def test_an_argument_with_gaps_is_copied_as_in_the_loop() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1)
        flat += 1
        return flat, x

    x = torch.randn(2, 4, 3)
    before = x.clone()
    flat, after = vmap(f, in_dims=1)(x)
    torch.testing.assert_close(flat, torch.stack([each.reshape(-1) + 1 for each in x.unbind(1)]))
    assert x.equal(before) and after.equal(before.movedim(1, 0))
