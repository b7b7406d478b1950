"""Writes in place: to batched values, views of them, and inputs; refused writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import vmap

X = torch.arange(1.0, 25.0).view(3, 2, 4).sin()
W = torch.arange(4.0).cos()


def written(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def func(x: Tensor) -> Tensor:
        y = x.clone()
        change(y)
        return y

    return func


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add_ a number": lambda y: y.add_(1),
    "add_ one from outside": lambda y: y.add_(W),
    "+=": lambda y: y.__iadd__(W),
    "mul_ itself": lambda y: y.mul_(y),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(2.0),
    "fill_ with a batched one": lambda y: y.fill_(y.sum()),
    "copy_": lambda y: y.copy_(W),
    "clamp_": lambda y: y.clamp_(0.0),
    "sqrt_": lambda y: y.abs_().sqrt_(),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 0),
    "scatter_": lambda y: y.scatter_(1, torch.tensor([[1], [0]]), 5.0),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([1]), W[None]),
    "index_fill_": lambda y: y.index_fill_(1, torch.tensor([1, 3]), 4.0),
    "an item": lambda y: y.__setitem__(0, 5.0),
    "an item, batched": lambda y: y.__setitem__(0, y[1] * 2),
    "a slice": lambda y: y.__setitem__((slice(None), slice(1, 3)), y[:, :2]),
    "a mask": lambda y: y.__setitem__(y > 0, 0.0),
    "indices": lambda y: y.__setitem__((torch.tensor([0, 1]), torch.tensor([1, 2])), W[:2]),
    "an item added to": lambda y: y[0].add_(y[1].sum()),
    "a view": lambda y: y[1:].mul_(2),
    "a view of a view": lambda y: y[1:][..., 2].mul_(2),
    "a transposed view": lambda y: y.T.add_(1),
    "a diagonal": lambda y: y.diagonal().zero_(),
    "a reshaped view": lambda y: y.view(-1)[::2].add_(y.sum()),
    "one of several views": lambda y: y.unbind(0)[1].copy_(W),
    "a split": lambda y: y.split(2, dim=1)[0].neg_(),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.unsqueeze_(1).squeeze_(1),
    "transpose_": lambda y: y.transpose_(0, 1),
    "t_": lambda y: y.t_(),
    "add_ out of place afterwards": lambda y: torch.add(y, 1).mul_(3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_written_in_place(name: str) -> None:
    func = written(CHANGES[name])
    same(vmap(func)(X), loop(func, 3)(X))
    same(vmap(func, in_dims=2)(X.movedim(0, 2)), loop(func, 3)(X))
    both = torch.stack([X, X + 1])
    same(vmap(vmap(func))(both), loop(loop(func, 3), 2)(both))


# torch's autograd refuses these, too.
NOT_DIFFERENTIABLE = ("mul_ itself", "one of several views", "a split")


@pytest.mark.parametrize("name", [n for n in CHANGES if n not in NOT_DIFFERENTIABLE])
def test_derivatives_of_writes_in_place(name: str) -> None:
    func = written(CHANGES[name])
    shape = vmap(func)(X)[0].shape
    weights = torch.arange(float(shape.numel())).view(shape).cos()

    def scalar(x: Tensor) -> Tensor:
        return (func(x * 1.5) * weights).sum()

    want = torch.stack([torch.func.grad(scalar)(x) for x in X])
    same(vmap(tsfunc.grad(scalar))(X), want)
    same(tsfunc.grad(lambda x: vmap(scalar)(x).sum())(X), want)


def _in_shape(x: Tensor, change: Callable[[Tensor], Any], of_view: bool) -> Tensor:
    """Change the shape of a tensor with views, or of a view, and then write into it."""
    y = x * 1.5
    view = y[:, 1:]
    changed = view if of_view else y
    change(changed)
    changed.add_(view.mean())
    return (view.sin() ** 2).sum() + (y.cos() * torch.arange(y.numel()).view(y.shape)).sum()


@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("name", ["t_", "transpose_", "unsqueeze_", "squeeze_"])
def test_a_changed_shape_and_views_differentiated(name: str, of_view: bool) -> None:
    change = CHANGES[name]

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(_in_shape(x, change, of_view), x)[0]

    x = X[:, :, :3] if of_view else X
    want = torch.stack([gradient(example) for example in x])
    same(vmap(tsfunc.grad(lambda x: _in_shape(x, change, of_view)))(x), want)
    tangents = vmap(lambda x: tsfunc.jvp(lambda x: _in_shape(x, change, of_view), (x,), (x,))[1])(x)
    same(tangents, (want * x).flatten(1).sum(1))
    program = tsfunc.specialize(tsfunc.grad(lambda x: _in_shape(x, change, of_view)))
    same(program(x[1]), want[1])


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(3, 2),
    "computed": lambda x: x[:2].sin().expand(3, 2) * 2,
    "expanded": lambda x: torch.ones_like(x[:2]).expand(3, 2).clone(),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "t_": lambda z: z.t_(),
    "swapaxes_": lambda z: z.swapaxes_(0, 1),
    "swapdims_": lambda z: z.swapdims_(1, 0),
    "transpose_": lambda z: z.transpose_(0, 1),
    "unsqueeze_": lambda z: z.unsqueeze_(0),
    "squeeze_": lambda z: z.unsqueeze_(0).squeeze_(),
}
WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda z, x: z,
    "mul_": lambda z, x: z.mul_(x[0]),
    "an item": lambda z, x: z.__setitem__((..., 0), x[0]),
    "fill_ of a view": lambda z, x: z[..., 1].fill_(x[1]),
    "copy_": lambda z, x: z[..., :1].copy_(x[1].sin()),
}


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("made", MADE)
def test_a_tensor_that_is_made_changed_in_shape_and_written(
    made: str, shape: str, write: str
) -> None:
    def func(x: Tensor) -> Tensor:
        z = MADE[made](x)
        SHAPES[shape](z)
        WRITTEN[write](z, x)
        return (z.sin() * torch.arange(z.numel()).view(z.shape)).sum() + (x**2).sum()

    x = torch.randn(3, 2)
    want = torch.stack([torch.autograd.functional.jacobian(func, x[:, i]) for i in range(2)])
    for one in (tsfunc.grad, tsfunc.jacfwd):
        same(one(func)(x[:, 1].clone()), want[1])
        same(tsfunc.specialize(one(func))(x[:, 0].clone()), want[0])
        same(vmap(one(func), in_dims=1)(x), want)
        same(tsfunc.specialize(vmap(one(func), in_dims=1))(x), want)
    same(tsfunc.grad(lambda x: vmap(func, in_dims=1)(x).sum())(x), want.T)


def test_a_view_and_its_base_stay_one() -> None:
    def func(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        view = y[1]
        y.mul_(2)
        view.add_(1)
        y[1, 0] = 7
        return y, view

    same(vmap(func)(X), loop(func, 3)(X))


def test_the_input_is_written() -> None:
    x = X.clone()
    out = vmap(lambda a: a.add_(1))(x)
    same(x, X + 1)
    same(out, X + 1)
    vmap(lambda a: a.mul_(2), in_dims=1)(x)
    same(x, (X + 1) * 2)
    vmap(vmap(lambda a, b: a.copy_(b), in_dims=(0, None)), in_dims=(0, None))(x, W)
    same(x, W.expand(3, 2, 4))


def test_one_from_outside_written_with_no_batched_values() -> None:
    w = W.clone()
    vmap(lambda x: w.add_(1) * x)(X)
    same(w, W + 1)


def test_out_is_an_argument() -> None:
    same(vmap(lambda x: torch.add(x, 1, out=torch.empty_like(x)))(X), X + 1)


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, w: w.add_(x[0]),
    "mul_": lambda x, w: w.mul_(x[0]),
    "copy_": lambda x, w: w.copy_(x[0]),
    "an item": lambda x, w: w.__setitem__(0, x[0, 0]),
    "a slice": lambda x, w: w.__setitem__(slice(1, 3), x[0, :2]),
    "masked_fill_": lambda x, w: w.masked_fill_(x[0] > 0, 0.0),
    "index_add_": lambda x, w: w.index_add_(0, torch.tensor([1]), x[0, :1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_from_outside_is_refused(name: str) -> None:
    before = W.clone()
    with pytest.raises(RuntimeError, match=r"not\s+batched") as caught:
        vmap(REFUSED[name], in_dims=(0, None))(X, before)
    assert "vmap: inplace arithmetic(self, *extra_args) is not possible because" in str(
        caught.value
    )
    same(before, W)


@pytest.mark.parametrize("size", [(1, 2, 2, 3), (2, 3, 1, 2), (1, 4, 3, 2)])
def test_resize_to_channels_last(size: tuple[int, ...]) -> None:
    def func(x: Tensor) -> Tensor:
        return x.clone().resize_(size, memory_format=torch.channels_last) * 2

    batch = torch.randn(3, 24)
    same(vmap(func)(batch), loop(func, 3)(batch))


def test_an_outer_batch_is_not_the_inner_one() -> None:
    """The tensor is batched over the outer vmap alone, so it has no dim for the inner examples."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="inplace arithmetic"):
        vmap(vmap(lambda a, b: a.add_(b), in_dims=(None, 0)))(x, torch.ones(3, 5))
    same(x, torch.ones(3))


@pytest.mark.parametrize("size", [(2, 2), (8,), (4, 2), (40,), (1, 3, 9)])
def test_resize(size: tuple[int, ...]) -> None:
    """Each example keeps its own first elements."""

    def func(x: Tensor) -> Tensor:
        return x.clone().resize_(size) * 2

    for bdim in (0, 2):
        known = X.select(bdim, 0).numel()  # elements beyond these are undefined
        got, want = vmap(func, in_dims=bdim)(X), loop(func, X.shape[bdim], bdim)(X)
        assert got.shape == want.shape
        same(got.flatten(1)[:, :known], want.flatten(1)[:, :known])


def test_a_detached_alias_follows_a_write() -> None:
    """Replacing the written tensor must update aliases of its memory."""
    outer, inner = torch.randn(2, 3), torch.randn(4, 3)

    def write(u: Tensor, v: Tensor) -> Tensor:
        y = v.clone()
        alias = y.detach()
        y.add_(u)
        return alias

    out = vmap(lambda u: vmap(lambda v: write(u, v))(inner))(outer)
    same(out, torch.stack([inner + u for u in outer]))
