"""Rows that compare the examples of a split batch: equal rows have equal Python values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc.ops.splitting import comparison_rows

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


@pytest.mark.parametrize("bdim", [0, 1, 2])
def test_rows_are_those_of_any_batch_dim(bdim: int) -> None:
    value = torch.randn(3, 2, 4)
    rows = comparison_rows(value.movedim(0, bdim), bdim, "tolist")
    assert torch.equal(rows, value)
