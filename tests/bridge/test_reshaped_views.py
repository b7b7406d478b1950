"""Views of results whose batch has another memory layout than one example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tsfunc
from tests.transforms.support import loop, same

X = torch.arange(60.0).view(4, 3, 5).sin()
W = torch.arange(15.0).view(3, 5).cos()

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "flattened": lambda x: (x * 2).view(-1),
    "split again": lambda x: (x * 2).view(2, 10).view(5, 4),
    "a layer's result": lambda x: torch.nn.functional.linear(x, W).view(2, 6),
    "the gradient of it": tsfunc.grad(
        lambda x: torch.nn.functional.linear(x, W).view(2, 6).square().sum()
    ),
    "a weight's gradient": lambda x: tsfunc.grad(
        lambda w: torch.nn.functional.linear(x[None], w).view(2, 6).square().sum()
    )(W * x.sum()),
    "the tangent": lambda x: tsfunc.jvp(lambda y: y.sin().view(-1) * y.cos().view(20), (x,), (x,)),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_of_results(name: str, dim: int) -> None:
    f = FUNCTIONS[name]
    batch = X if dim else X.movedim(1, 0).contiguous()
    want = loop(lambda x: f(x.clone()), 3, dim)(batch)
    same(tsfunc.vmap(f, in_dims=dim)(batch), want)


def test_gradients_through_views_of_nested_batches() -> None:
    batch = torch.arange(120.0).view(4, 2, 3, 5).sin()
    f = FUNCTIONS["the gradient of it"]
    got = tsfunc.vmap(tsfunc.vmap(f, in_dims=1), in_dims=1)(batch)
    same(got, torch.stack([torch.stack([f(y) for y in x]) for x in batch.permute(1, 2, 0, 3)]))


def test_it_is_a_view() -> None:
    """A write through the view is visible in the result, and the reverse."""

    def written(x: Tensor) -> tuple[Tensor, Tensor]:
        result = x * 2
        flat = result.view(-1)
        flat[0] = 7
        result[-1] = 5
        return result, flat

    result, flat = tsfunc.vmap(written, in_dims=1)(X)
    want = X.movedim(1, 0) * 2
    want[:, 0, 0], want[:, -1] = 7, 5
    same(result, want)
    same(flat, want.reshape(3, -1))


def test_attention_layers_reshape_views() -> None:
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 5, 3, 4)

    def attended(x: Tensor) -> Tensor:
        return attention(x, x, x)[0]

    same(tsfunc.vmap(attended, in_dims=2)(x), loop(attended, 3, 2)(x), rtol=1e-5, atol=1e-5)


OWN_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.tensor([3, 0, 7])),
    "its method": lambda x: x.take_along_dim(torch.tensor([[3], [0]])),
    "its gradient": tsfunc.grad(lambda x: x.take_along_dim(torch.tensor([3])).sin().sum()),
    "its indices": lambda x: torch.take_along_dim(torch.arange(30.0), x.abs().long()),
    "its result": lambda x: torch.take_along_dim(x, x.abs().long(), out=torch.empty(0)),
    "along a dim": lambda x: torch.take_along_dim(x, torch.zeros(1, 5, dtype=torch.long), 0),
    "native_group_norm": lambda x: torch.native_group_norm(x, None, None, 4, 5, 1, 5, 1e-3),
    "its tangent": lambda x: tsfunc.jvp(
        lambda x: torch.native_group_norm(x, None, None, 2, 2, 5, 1, 1e-3)[0],
        (x.unflatten(0, (2, 2)),),
        (x.cos().unflatten(0, (2, 2)),),
    ),
}


@pytest.mark.parametrize("name", OWN_VIEWS)
def test_views_that_torch_itself_takes(name: str) -> None:
    """Two torch functions take views of an argument from outside, although the user takes none."""
    f = OWN_VIEWS[name]
    same(tsfunc.vmap(f, in_dims=1)(X), loop(lambda x: f(x.clone()), 3, 1)(X))


def _read_after_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.view(-1)
    x.mul_(2)
    return flat * 1, x


def _written_through(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.view(-1)
    flat[3:7].mul_(3)
    flat.view(2, 10)[1].add_(1)
    return x * 1, flat


def _beside_a_row(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * 2
    row = y[0]
    flat = y.view(-1)
    flat[1] = 7
    row.add_(1)
    return flat, row, y


# Views that exist for one example, and not for the batch.
COPIED: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda x: x.view(-1),
    "to the shape of another": lambda x: x.view_as(torch.zeros(2, 10)),
    "of a view": lambda x: x[1:].view(-1),
    "of a view of it": lambda x: x.view(-1)[3:].view(17, 1).squeeze(1),
    "read after a write": _read_after_a_write,
    "written through": _written_through,
    "beside a row": _beside_a_row,
}


@pytest.mark.parametrize("name", COPIED)
def test_copied_views(name: str) -> None:
    """Copied views behave like views: the tensor and the batch see what is written into them."""
    f = COPIED[name]
    ours, theirs = X.clone(), X.movedim(1, 0).contiguous()
    got = tsfunc.vmap(f, in_dims=1)(ours)
    same(got, loop(f, 3)(theirs))
    same(ours.movedim(1, 0), theirs)


@pytest.mark.parametrize("name", COPIED)
def test_a_call_with_a_plan_has_copied_views(name: str) -> None:
    """The plan is made from a batch that has the view, and serves a batch that does not."""
    f = COPIED[name]
    for in_dim in (0, 1, 0, 1, 1):
        examples = X.movedim(1, 0).contiguous()
        batch = examples.movedim(0, in_dim).clone(memory_format=torch.contiguous_format)
        same(tsfunc.vmap(f, in_dims=in_dim)(batch), loop(f, 3)(examples))


@pytest.mark.parametrize("name", COPIED)
def test_derivatives_of_copied_views(name: str) -> None:
    """The functions get a copy of the input, so that they may write to it."""

    def total(x: Tensor) -> Tensor:
        outs = COPIED[name](x.clone(memory_format=torch.contiguous_format))
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.stack([(y.sin() * y).sum() for y in outs]).sum()

    def tangent(x: Tensor) -> Tensor:
        return tsfunc.jvp(total, (x,), (x.cos(),))[1]

    x = X.double()
    for f in (tsfunc.grad(total), tangent, tsfunc.hessian(total)):
        same(tsfunc.vmap(f, in_dims=1)(x), loop(lambda x, f=f: f(x.clone()), 3, 1)(x))
    whole = tsfunc.grad(lambda x: tsfunc.vmap(total, in_dims=1)(x).sum())(x)
    same(whole.movedim(1, 0), loop(tsfunc.grad(total), 3, 1)(x))


def test_derivatives_of_a_view_beside_an_equal_view() -> None:
    """The batch dim is in front of the views, but the first step of their memory is not its own."""

    def total(x: Tensor) -> Tensor:
        y = x.clone()
        halves, same_halves = y.view(2, -1), y.view(2, -1)
        return (halves.view(-1).sin() * same_halves.cos().reshape(-1)).sum()

    x = torch.arange(72.0).view(2, 3, 3, 4).double()
    # Calls of the same kinds that have the view leave a plan for it.
    tsfunc.vmap(tsfunc.grad(lambda x: x.clone().view(2, -1).view(-1).sum()))(x.movedim(1, 0))
    for f in (tsfunc.grad(total), tsfunc.hessian(total)):
        same(tsfunc.vmap(f, in_dims=1)(x), loop(lambda x, f=f: f(x.contiguous()), 3, 1)(x))


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(-1),
    lambda x: x.view(2, -1),
    lambda x: x.view(-1, 2),
    lambda x: x.view_as(torch.zeros(x.numel() // 2, 2)),
    lambda x: x.view(2, -1).T,
    lambda x: x[0] if x.dim() > 1 else x,
    lambda x: x[..., 1:],
    lambda x: x.mT if x.dim() > 1 else x,
]
# Only for the function's own tensors: for an argument, the example's strides decide on a view.
RESHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.reshape(-1),
    lambda x: x.reshape(2, -1),
    lambda x: x.mT.reshape(-1) if x.dim() > 1 else x,
    lambda x: x.flatten(),
]
# The clone is needed: a copy to a tensor that shares memory with its source is undefined in torch.
WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: x.add_(1),
    lambda x, y: x.mul_(2),
    lambda x, y: x.cos_(),
    lambda x, y: x[0].neg_(),
    lambda x, y: x.copy_(y.clone()) if x.shape == y.shape else x.zero_(),
    lambda x, y: x[-1].add_(y.reshape(-1)[0]),
]
STEP = st.tuples(st.booleans(), *[st.integers(0, 23)] * 3)


@settings(max_examples=100, deadline=None)
@given(
    shape=st.sampled_from([(4, 6), (2, 3, 4), (6, 2, 2)]),
    at=st.integers(0, 2),
    own=st.booleans(),
    steps=st.lists(STEP, min_size=2, max_size=6),
)
def test_any_program_of_views_and_writes(
    shape: tuple[int, ...], at: int, own: bool, steps: list[tuple[bool, int, int, int]]
) -> None:
    kinds = VIEWS + RESHAPES if own else VIEWS

    def program(x: Tensor) -> tuple[Tensor, ...]:
        views = [x.clone(memory_format=torch.contiguous_format) if own else x]
        for writes, kind, which, other in steps:
            chosen, another = views[which % len(views)], views[other % len(views)]
            if writes:
                WRITES[kind % len(WRITES)](chosen, another)
            else:
                views.append(kinds[kind % len(kinds)](chosen))
        return tuple(view * 1 for view in views)

    examples = torch.arange(3.0 * 24).view(3, *shape).double().sin()
    ours, theirs = examples.movedim(0, at).contiguous(), examples.clone()
    try:
        want = loop(program, 3)(theirs)
    except (RuntimeError, IndexError):
        return  # torch refuses it
    same(tsfunc.vmap(program, in_dims=at)(ours), want)
    same(ours.movedim(at, 0), theirs)

    def total(x: Tensor) -> Tensor:
        return torch.stack([y.sin().sum() for y in program(x.clone())]).sum()

    try:
        gradients = loop(tsfunc.grad(total), 3)(examples)
    except RuntimeError:
        return  # a saved value was written to
    batch = examples.movedim(0, at).contiguous()
    same(tsfunc.vmap(tsfunc.grad(total), in_dims=at)(batch), gradients)
    same(tsfunc.vmap(tsfunc.jacfwd(total), in_dims=at)(batch), gradients)


def test_copied_views_of_pairs_as_complex_numbers() -> None:
    x = torch.randn(4, 2, 3)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.view_as_complex(x)
        numbers.mul_(1j)
        return numbers * 2, x

    ours, theirs = x.clone(), x.movedim(2, 0).contiguous()
    same(tsfunc.vmap(f, in_dims=2)(ours), loop(f, 3)(theirs))
    same(ours.movedim(2, 0), theirs)
    with pytest.raises(RuntimeError, match="must have a last dimension of size 2"):
        tsfunc.vmap(torch.view_as_complex, in_dims=2)(torch.randn(4, 3, 3))
    with pytest.raises(RuntimeError, match="must have a last dimension with stride 1"):
        tsfunc.vmap(lambda x: torch.view_as_complex(x.mT), in_dims=2)(torch.randn(2, 4, 3))


def test_in_programs() -> None:
    f = tsfunc.specialize(tsfunc.vmap(_written_through, in_dims=1))
    ours, theirs = X.clone(), X.clone()
    same(f(ours), tsfunc.vmap(_written_through, in_dims=1)(theirs))


def test_where_an_example_has_no_view() -> None:
    def f(x: Tensor) -> Tensor:
        return x.T.view(-1)

    with pytest.raises(RuntimeError, match=r"view size is not compatible"):
        tsfunc.vmap(f, in_dims=1)(X)


def test_a_shape_that_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid for input of size 20"):
        tsfunc.vmap(lambda x: (x * 2).view(7), in_dims=1)(X)
