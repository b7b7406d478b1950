"""Views of results that the batch has laid out in another way than an example is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def test_nested() -> None:
    batch = torch.arange(120.0).view(4, 2, 3, 5).sin()
    f = FUNCTIONS["the gradient of it"]
    got = tsfunc.vmap(tsfunc.vmap(f, in_dims=1), in_dims=1)(batch)
    same(got, torch.stack([torch.stack([f(y) for y in x]) for x in batch.permute(1, 2, 0, 3)]))


def test_it_is_a_view() -> None:
    """What is written through it is seen in the result, and the other way round."""

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


def test_modules() -> None:
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 5, 3, 4)

    def attended(x: Tensor) -> Tensor:
        out: Tensor = attention(x, x, x)[0]
        return out

    same(tsfunc.vmap(attended, in_dims=2)(x), loop(attended, 3, 2)(x), rtol=1e-5, atol=1e-5)


OWN_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.tensor([3, 0, 7])),
    "its method": lambda x: x.take_along_dim(torch.tensor([[3], [0]])),
    "its gradient": tsfunc.grad(lambda x: x.take_along_dim(torch.tensor([3])).sin().sum()),
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
    """Of an argument from outside, where the user asks for none."""
    f = OWN_VIEWS[name]
    same(tsfunc.vmap(f, in_dims=1)(X), loop(lambda x: f(x.clone()), 3, 1)(X))


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "what is from outside": lambda x: x.view(-1),
    "a view of that": lambda x: x[1:].view(-1),
    "what has a view": lambda x: _with_a_row(x * 2),
}


def _with_a_row(x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[0]
    return x.view(-1), row


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_would_be_none(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"view size is not compatible .* the batch dim lies"):
        tsfunc.vmap(REFUSED[name], in_dims=1)(X)


def test_a_shape_that_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid for input of size 20"):
        tsfunc.vmap(lambda x: (x * 2).view(7), in_dims=1)(X)
