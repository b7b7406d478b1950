"""Types, strides, identity and memory of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.semantics.transform_tables import (
    BATCHED,
    EAGER,
    PROGRAMS,
    SAME,
    Function,
    Transform,
    X,
    every,
)
from tsfunc import (
    checkpoint,
    grad,
    jacrev,
    jvp,
    pytrees,
    specialize,
    vjp,
)

# --- types

TYPES: dict[str, Function] = {
    "a number and a tensor": lambda x: x.sum().double() * torch.ones(2),
    "a number and integers": lambda x: x.sum() + torch.arange(2),
    "a number of one and elements of the other": lambda x: x[0].double() * x,
    "halves and Python's": lambda x: x.half() * 2.5,
    "integers divided": lambda x: x.long() / 2,
    "integers and halves": lambda x: x.long()[0] + x.half(),
    "powers": lambda x: x.long() ** 2.0,
    "a sum of bools": lambda x: (x > 0).sum(),
    "a choice": lambda x: torch.where(x > 2, 1, x.half()),
    "complex": lambda x: x.sum() * 1j,
    "two numbers": lambda x: x.sum().half() * torch.tensor(2.0),
}


@pytest.mark.parametrize("f", TYPES.values(), ids=TYPES.keys())
@every(BATCHED)
def test_types_of_a_batch_are_those_of_the_loop(transform: Transform, f: Function) -> None:
    want = torch.stack([f(x) for x in X])
    got = transform(f)(X)
    assert got.dtype is want.dtype and torch.equal(got, want)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "expanded": lambda x: x[:1].expand(2, 3, 4, 5),
    "with gaps": lambda x: x[:, :, ::2],
}
SHAPED: dict[str, Function] = {
    "elementwise": torch.sin,
    "broadcast": lambda x: x + torch.ones(x.shape[1:]),
    "transposed": lambda x: x.transpose(1, 2),
    "cloned": lambda x: x.clone(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "reshaped": lambda x: x.reshape(-1),
    "reduced": lambda x: x.sum(1),
    "joined": lambda x: torch.cat([x, x]),
    "product": lambda x: x @ x.mT,
    "convolved": lambda x: F.conv2d(x, torch.ones(2, x.shape[1], 1, 1)),
    "written": lambda x: torch.empty_like(x).copy_(x),
    "other type": lambda x: x.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("f", SHAPED.values(), ids=SHAPED.keys())
@every(SAME)
def test_results_have_the_type_and_strides_of_the_functions(
    transform: Transform, f: Function, layout: Callable[[Tensor], Tensor]
) -> None:
    x = layout(torch.randn(2, 3, 4, 5))
    got, want = transform(f)(x), f(x)
    assert got.dtype is want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


# --- identity and memory

W = torch.ones(2)
SHARED: dict[str, Function] = {
    "the argument": lambda x: [x],
    "twice": lambda x: [x.sin()] * 2,
    "views": lambda x: [x[..., :1], x.view(-1), x.mT if x.dim() > 1 else x[:]],
    "views of one result": lambda x: (lambda y: [y, y[..., 0], y.view(-1)])(x.sin()),
    "copies": lambda x: [x.clone(), x.clone(), x + 0, x * 1],
    "a captured tensor": lambda x: [W, W[:1], x],
    "equal values": lambda x: [x.sin(), x.sin(), torch.zeros(2), torch.zeros(2)],
}


def memory(values: Sequence[Any]) -> list[list[bool]]:
    """Return which of the values share memory."""
    ids = [x.untyped_storage().data_ptr() for x in values]
    return [[a == b for b in ids] for a in ids]


@pytest.mark.parametrize("f", SHARED.values(), ids=SHARED.keys())
@every(SAME, BATCHED)
def test_results_share_memory_as_the_functions_do(transform: Transform, f: Function) -> None:
    g = transform(f)
    for _ in range(2):
        assert memory([X, W, *g(X)]) == memory([X, W, *f(X)])


# Operators that return their argument itself, or a view of it that is another tensor.
ITSELF: dict[str, Function] = {
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "cpu": lambda x: x.cpu(),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.zeros(1)),
    "contiguous": lambda x: x.contiguous(),
    "flatten": lambda x: x.flatten(-1, -1),
    "resolve_conj": lambda x: x.resolve_conj(),
    "real": lambda x: x.real,
    "positive": lambda x: +x,
    "dropout": lambda x: F.dropout(x, training=False),
    "atleast_1d": lambda x: torch.atleast_1d([x])[0],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x.new_zeros(1))[0],
    "view": lambda x: x.view_as(x),
    "index": lambda x: x[...],
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("f", ITSELF.values(), ids=ITSELF.keys())
@every(EAGER, PROGRAMS)
def test_operators_return_their_argument_itself_as_in_plain_code(
    transform: Transform, f: Function
) -> None:
    calls: list[tuple[bool, int]] = []

    def g(x: Tensor) -> Tensor:
        y = f(x)
        calls.append((y is x, x.dim()))
        return y

    for _ in range(3):  # plans and recipes serve the later calls
        transform(g)(X)
    for is_itself, dim in calls:
        x = torch.ones([2] * dim)
        assert is_itself == (f(x) is x)


AUXILIARY: dict[str, Transform] = {
    "vjp": lambda f: lambda x: vjp(f, x, has_aux=True)[::2],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,), has_aux=True)[::2],
    "jacrev": lambda f: jacrev(f, has_aux=True),
    "grad": lambda f: grad(lambda x: (f(x)[0].sum(), f(x)[1]), has_aux=True),
    "specialize": specialize,
    "checkpoint": checkpoint,
    **BATCHED,
}


@every(AUXILIARY)
def test_non_tensors_are_returned_themselves(transform: Transform) -> None:
    thing = object()
    g = transform(lambda x: (x.sin(), (thing, "word")))
    for _ in range(2):
        kept = g(X)[1]
        assert kept[0] is thing and kept[1] == "word"


@pytest.mark.parametrize("transform", [specialize, checkpoint])
def test_the_argument_and_captured_tensors_come_back_themselves(transform: Any) -> None:
    same = torch.zeros(2)
    g = transform(lambda x: (x, [same, x], x.sin()))
    for _ in range(2):
        x = torch.ones(3)
        a, (b, c), d = g(x)
        assert a is x and b is same and c is x and d is not x


OF_CONTAINERS: dict[str, Transform] = {
    **EAGER,
    "vjp": lambda f: lambda x: vjp(f, x),
    "jvp": lambda f: lambda x: jvp(f, (x,), (pytrees.tree_map(torch.ones_like, x),)),
}


@every(OF_CONTAINERS)
def test_a_function_gets_containers_of_its_own(transform: Transform) -> None:
    seen = []

    def f(x: Any) -> Any:
        x["more"] = 1
        x["list"].append(2)
        seen.append(len(x["list"]))
        return x["list"][0].sin()

    given = {"list": [X]}
    transform(f)(given)
    assert seen == [2] and list(given) == ["list"] and len(given["list"]) == 1
