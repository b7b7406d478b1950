"""A list of bools as an index is a constant, so a trace knows the size of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import specialize, vmap

Call = Callable[..., Any]


def write(index: Call, value: Call) -> Call:
    """Return the function that writes into a copy."""

    def of(x: Tensor, i: Tensor) -> Tensor:
        y = x.clone()
        y[index(i)] = value(y, i)
        return y

    return of


CALLS: dict[str, Call] = {
    "alone": lambda x, i: x[[True, False, True]],
    "beside an index": lambda x, i: x[[True, False, True], i],
    "two": lambda x, i: x[[True, False, True], [True, False, False, True]],
    "over two dims": lambda x, i: x[([[True, False, True, False]] * 3,)],
    "after an ellipsis": lambda x, i: x[..., [True, False, True, True]],
    "after None": lambda x, i: x[None, [True, False, True], i[0]],
    "after a slice": lambda x, i: x[1:, [True, False, True, True]],
    "after a scalar": lambda x, i: x[i[0], [True, False, True, True]],
    "after a bool": lambda x, i: x[True, [True, False, True]],
    "without True": lambda x, i: x[[False] * 3],
    "without True, beside an index": lambda x, i: x[[False] * 3, i],
    "a write": write(lambda i: [True, False, True], lambda y, i: 0.0),
    "a write beside an index": write(lambda i: ([True, False, True], i), lambda y, i: i + 1.0),
    "a write after a scalar": write(
        lambda i: (i[0], [True, False, True, True]), lambda y, i: y[0, :3]
    ),
    "a write to nothing": write(lambda i: ([False] * 3, i), lambda y, i: i + 1.0),
    "a write at the end": write(
        lambda i: (..., [True, False, True, False]), lambda y, i: y[:, :2] * i + 7
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_list_of_bools_selects_as_it_does_in_torch(name: str) -> None:
    call = CALLS[name]
    x, i = torch.rand(4, 3, 4), torch.randint(3, (4, 1))
    want = torch.stack([call(*each) for each in zip(x, i, strict=True)])
    assert specialize(call)(x[0], i[0]).equal(want[0])
    assert vmap(call)(x, i).equal(want)
    assert vmap(call, chunk_size=3)(x, i).equal(want)
    assert specialize(vmap(call, chunk_size=3))(x, i).equal(want)
    mapped = specialize(lambda x, i: tsfunc.map(lambda pair: call(*pair), (x, i)))
    assert mapped(x, i).equal(want)


@pytest.mark.parametrize("mask", [[True], [True] * 4, [[True, False]] * 3])
def test_a_list_of_another_size_is_refused(mask: list[Any]) -> None:
    def call(x: Tensor) -> Tensor:
        return x[(mask,)]

    x = torch.rand(2, 3, 4)
    for run in (call, specialize(call)):
        with pytest.raises(IndexError, match="The shape of the mask"):
            run(x[0])
    for mapped in (vmap(call), specialize(vmap(call, chunk_size=1))):
        with pytest.raises(IndexError, match="The shape of the mask"):
            mapped(x)
