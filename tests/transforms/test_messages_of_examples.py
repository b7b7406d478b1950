"""torch's message for wrong sizes is the one that the loop over the examples raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tsfunc import grad, specialize, vmap

Function = Callable[..., Any]


def ones(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.ones(shape) for shape in shapes]


def index(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


# Calls that torch refuses. Rules run them as other operators, or on tensors with more dims.
REFUSED: dict[str, tuple[Function, list[Tensor]]] = {
    "dot": (torch.dot, ones((3,), (4,))),
    "mv": (torch.mv, ones((3, 2), (4,))),
    "matmul": (torch.matmul, ones((2, 3), (4, 5))),
    "linear": (F.linear, ones((3,), (5, 4))),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), ones((2, 3), (4, 5))),
    "cat": (lambda x, y: torch.cat([x, y], dim=0), ones((2, 3), (2, 4))),
    "stack": (lambda x, y: torch.stack([x, y]), ones((2, 3), (2, 4))),
    "view": (lambda x: x.view(4, 2), ones((2, 3))),
    "expand": (lambda x: x.expand(4, 5), ones((2, 3))),
    "expand to fewer dims": (lambda x: x.expand(3), ones((2, 3))),
    "select": (lambda x: x.select(0, 5), ones((2, 3))),
    "narrow": (lambda x: x.narrow(0, 1, 3), ones((2, 3))),
    "unsqueeze": (lambda x: x.unsqueeze(4), ones((2, 3))),
    "topk": (lambda x: x.topk(5), ones((2, 3))),
    "keyword": (lambda x: x.sum(dim=2), ones((2, 3))),
    "setitem": (lambda x, y: x.clone().__setitem__(0, y), ones((2, 3), (4,))),
    "in place": (lambda x, y: x.clone().add_(y), ones((3,), (2, 3))),
    "gather": (lambda x: x.gather(1, index(4, 2)), ones((2, 3))),
    "scatter": (lambda x: x.scatter(0, index(4, 4), 1.0), ones((2, 3))),
    "reflection": (lambda x: F.pad(x, (5, 5), mode="reflect"), ones((2, 3))),
    "searchsorted": (torch.searchsorted, ones((2, 3), (3, 3))),
    "attention": (F.scaled_dot_product_attention, ones((2, 3, 4), (2, 3, 5), (2, 3, 5))),
}


def batched(values: list[Tensor], size: int, dim: int) -> list[Tensor]:
    return [torch.stack([x] * size, dim) for x in values]


def summed(f: Function) -> Function:
    return lambda *xs: torch.as_tensor(f(*xs)).sum()


# Sizes of batches that no example has.
CALLS: dict[str, Callable[[Function, list[Tensor]], Any]] = {
    "vmap": lambda f, xs: vmap(f)(*batched(xs, 13, 0)),
    "last dim": lambda f, xs: vmap(f, in_dims=-1)(*batched(xs, 13, -1)),
    "first argument": lambda f, xs: vmap(f, (0, *[None] * (len(xs) - 1)))(
        *batched(xs[:1], 13, 0), *xs[1:]
    ),
    "nested": lambda f, xs: vmap(vmap(f, in_dims=-1))(*batched(batched(xs, 17, -1), 13, 0)),
    "vmap(grad)": lambda f, xs: vmap(grad(summed(f)))(*batched(xs, 13, 0)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", REFUSED)
def test_the_message_is_that_of_the_loop(name: str, call: str) -> None:
    f, values = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)) as alone:
        f(*values)
    with pytest.raises(type(alone.value)) as caught:
        CALLS[call](f, values)
    assert str(caught.value) == str(alone.value)


@pytest.mark.parametrize("name", ["matmul", "stack", "view", "expand", "gather"])
def test_the_message_of_a_trace_is_that_of_an_example(name: str) -> None:
    f, values = REFUSED[name]
    with pytest.raises(RuntimeError) as alone:
        f(*values)
    with pytest.raises(RuntimeError) as caught:
        specialize(vmap(f))(*batched(values, 13, 0))
    assert str(caught.value) == str(alone.value)


def test_the_index_of_an_example_is_looked_up_in_its_values() -> None:
    x = torch.ones(13, 2, 3)
    with pytest.raises(IndexError) as alone:
        x[0][torch.tensor([5, 1])]
    with pytest.raises(IndexError) as caught:
        vmap(lambda x, i: x[i])(x, torch.tensor([[5, 1]] * 13))
    assert str(caught.value) == str(alone.value)


def test_a_refused_write_leaves_the_tensor_alone() -> None:
    x = torch.zeros(13, 2, 3)
    with pytest.raises(RuntimeError, match=r"must match the existing size|must match the size"):
        vmap(lambda x: x.add_(torch.ones(4)))(x)
    assert not x.any()


def test_an_error_that_no_example_has_keeps_its_message() -> None:
    def second_backward(x: Tensor) -> Tensor:
        y = x.requires_grad_().sin().sum()
        y.backward()
        y.backward()
        return x

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        vmap(second_backward)(torch.ones(13, 2))


def test_the_message_does_not_depend_on_the_shown_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsfunc.config, "traceback", "full")
    with pytest.raises(RuntimeError, match=r"\[3\]"):
        vmap(torch.dot)(*batched(ones((3,), (4,)), 13, 0))


def test_a_refusal_of_the_transform_keeps_its_message() -> None:
    x = torch.zeros(13, 2)
    with pytest.raises(RuntimeError, match="sum of probabilities"):
        x[0].multinomial(1)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: x.multinomial(1))(x)


def test_blocks_are_matrices() -> None:
    with pytest.raises(RuntimeError, match="2 or fewer dimensions"):
        vmap(torch.block_diag)(torch.ones(13, 2, 3, 4))
