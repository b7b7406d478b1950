"""Indexing by drawn mixtures of slices, numbers, integer tensors and masks is the loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import vmap
from tsfunc.errors import DataDependentError

EXAMPLES, SHAPE, CHOSEN = 3, (4, 5, 3, 2), 2


def drawn_index(draw: random.Random, size: int, batched: bool) -> Tensor:
    """Return integers that differ, or a mask; each chooses as many elements in each example."""
    order = torch.rand(*((EXAMPLES,) if batched else ()), size).argsort(-1)
    return order < CHOSEN if draw.random() < 0.5 else order[..., :CHOSEN] - draw.choice([0, size])


def drawn_call(draw: random.Random) -> tuple[list[Any], list[Tensor], list[int | None]]:
    """Return the index of each dim, with numbers for the places of tensors, and the tensors."""
    kinds: list[Any] = []
    tensors: list[Tensor] = []
    in_dims: list[int | None] = []
    for size in SHAPE[: draw.randint(1, 4)]:
        kind = draw.choice(["slice", "tensor", "tensor"])
        if kind == "slice":
            kinds.append(slice(draw.randint(0, 1), size))
            continue
        batched = draw.random() < 0.6
        index = drawn_index(draw, size, batched)
        bdim = draw.choice([0, 1]) if batched else None
        kinds.append(len(tensors))
        tensors.append(index if bdim is None else index.movedim(0, bdim))
        in_dims.append(bdim)
    return kinds, tensors, in_dims


def whole_index(kinds: list[Any], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tuple(tensors[kind] if isinstance(kind, int) else kind for kind in kinds)


@pytest.mark.parametrize("number", range(60))
def test_a_drawn_index_is_the_loop(number: int) -> None:
    draw = random.Random(torch.initial_seed() + number)
    kinds, tensors, in_dims = drawn_call(draw)
    batched = draw.random() < 0.7 or all(bdim is None for bdim in in_dims)
    bdim = draw.randint(0, len(SHAPE)) if batched else None
    whole = torch.randn(EXAMPLES, *SHAPE)
    x = whole[0] if bdim is None else whole.movedim(0, bdim)

    def read(x: Tensor, *tensors: Tensor) -> Tensor:
        return x[whole_index(kinds, tensors)]

    def written(x: Tensor, *tensors: Tensor) -> Tensor:
        x = x.clone()
        x[whole_index(kinds, tensors)] = 7.0
        return x

    dims = (bdim, *in_dims)
    args = (x, *tensors)
    examples = [
        [a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)]
        for i in range(EXAMPLES)
    ]
    for f in (read, written):
        expected = torch.stack([f(*example) for example in examples])
        try:
            found = vmap(f, dims)(*args)
        except DataDependentError:  # a mask that differs between examples
            found = vmap(f, dims, data_dependent="split")(*args)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("number", range(60))
def test_a_write_of_drawn_values_at_a_drawn_index_is_the_loop(number: int) -> None:
    draw = random.Random(torch.initial_seed() + number)
    kinds, tensors, in_dims = drawn_call(draw)
    whole = torch.randn(EXAMPLES, *SHAPE)
    one_of_each = [
        a if d is None else a.select(d, 0) for a, d in zip(tensors, in_dims, strict=True)
    ]
    target = whole[0][whole_index(kinds, tuple(one_of_each))].shape
    shape = [draw.choice([size, size, 1]) for size in target[draw.randint(0, len(target)) :]]
    v_dim = draw.choice([None, *range(len(shape) + 1)])
    values = torch.randn(shape if v_dim is None else [*shape[:v_dim], EXAMPLES, *shape[v_dim:]])
    x_dim = draw.randint(0, len(SHAPE))
    added = draw.random() < 0.3

    def written(x: Tensor, values: Tensor, *tensors: Tensor) -> Tensor:
        if added and not any(isinstance(kind, slice) for kind in kinds):
            return x.index_put(whole_index(kinds, tensors), values, accumulate=True)
        x = x.clone()
        x[whole_index(kinds, tensors)] = values
        return x

    dims = (x_dim, v_dim, *in_dims)
    args = (whole.movedim(0, x_dim), values, *tensors)
    examples = [
        [a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)]
        for i in range(EXAMPLES)
    ]
    expected = torch.stack([written(*example) for example in examples])
    try:
        found = vmap(written, dims)(*args)
    except DataDependentError:  # a mask that differs between examples
        found = vmap(written, dims, data_dependent="split")(*args)
    torch.testing.assert_close(found, expected)
