"""Rows that compare the examples of a split batch: equal rows have equal Python values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc.ops.dims import memory_order
from tsfunc.ops.splitting import common_value, comparison_rows, take_examples

METHODS: dict[str, Callable[[Tensor], Any]] = {
    "__bool__": bool,
    "is_nonzero": torch.is_nonzero,
    "__int__": int,
    "__float__": float,
    "item": lambda x: x.item(),
    "__complex__": complex,
}
VALUES = [0.0, -0.0, 1.0, 2.0, -1.0, 0.4, -0.4, 1.6, 2.5]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_rows_are_equal_where_the_values_of_a_method_are(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(torch.initial_seed())
    numbers = torch.tensor(draw.sample(VALUES, len(VALUES)), dtype=torch.float64)
    value = (numbers.abs() if dtype is torch.uint8 else numbers).to(dtype)
    rows = comparison_rows(value, 0, name)
    assert len(rows) == len(value)
    results = [METHODS[name](x) for x in value]
    for i, one in enumerate(results):
        for j, other in enumerate(results):
            if torch.equal(rows[i], rows[j]):
                assert one == other, (value[i], value[j])
            if name in ("__bool__", "is_nonzero", "__int__"):
                assert torch.equal(rows[i], rows[j]) == (one == other), (value[i], value[j])


@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize("name", ["__bool__", "__int__", "__float__", "item", "is_nonzero"])
def test_a_common_value_is_that_of_all_examples(name: str, count: int) -> None:
    for number in (2.0, -1.5, 3, True, 0):
        value = torch.full((count,), number)
        assert common_value(value, name) == METHODS[name](value[0])
        if count > 1:
            value[count // 2] = not number
            assert common_value(value, name) is None
    for number in (0.0, float("inf"), float("nan")):  # signs may differ; no integer, not equal
        assert common_value(torch.full((count,), number), name) is None
    assert common_value(torch.ones(count), "tolist") is None
    assert common_value(torch.ones(count, dtype=torch.complex64), name) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("bdim", [0, 1, 2])
@pytest.mark.parametrize("chosen", [[], [0], [1, 2], [1, 2, 3, 4], [0, 2], [4, 1, 1], [3, 2]])
def test_taken_examples(chosen: list[int], bdim: int, order: tuple[int, ...]) -> None:
    """Adjacent examples are a view; others are a copy with the dims in the same order in memory."""
    base = torch.randn(5, 5, 5)
    x = base.permute(order)
    positions = torch.tensor(chosen, dtype=torch.int64)
    taken = take_examples(x, bdim, positions)
    assert torch.equal(taken, x.index_select(bdim, positions))
    adjacent = chosen == list(range(chosen[0], chosen[-1] + 1)) if chosen else True
    if len(chosen) != 3:  # examples may be repeated
        assert (taken._base is base) == adjacent
    if not adjacent:
        assert memory_order(taken.shape, taken.stride()) == memory_order(x.shape, x.stride())


@pytest.mark.parametrize("bdim", [0, 1, 2])
def test_rows_are_those_of_any_batch_dim(bdim: int) -> None:
    value = torch.randn(3, 2, 4)
    rows = comparison_rows(value.movedim(0, bdim), bdim, "tolist")
    assert torch.equal(rows, value)
