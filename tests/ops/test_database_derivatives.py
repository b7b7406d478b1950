"""The law of the derivative modes on rows of the operator database: a batch is the loop.

The quick suite takes a sample of the rows, and slow tests take all; ``tools/sweeping`` tries more
samples of each row.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.ops.database import FUNCTION, INPLACE, Row, rows
from tests.ops.derivative_sweep import sweep
from tests.ops.derivatives import (
    MODES,
    NotDifferentiable,
    torch_pushed,
    torch_pushed_by_pulling,
)
from tests.ops.sweep import Mode, check_row

ROWS = [
    row
    for row in rows()
    if row.variant in (FUNCTION, INPLACE) and torch.float64 in row.differentiable
]
OTHERS = (torch.float32, torch.complex128, torch.complex64, torch.bfloat16)
is_right = functools.partial(check_row, sweep)


@pytest.mark.parametrize("row", ROWS[11::90], ids=lambda row: row.name)
def test_a_sample(row: Row) -> None:
    for mode in MODES:
        is_right(row, torch.float64, mode, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row(row: Row, mode: Mode) -> None:
    is_right(row, torch.float64, mode, most=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("row", ROWS[::8], ids=lambda row: row.name)
def test_other_types(row: Row, dtype: torch.dtype) -> None:
    for mode in MODES if dtype in row.differentiable else ():
        is_right(row, dtype, mode, most=1)


X = torch.tensor([[7.0, 9.0], [8.5, 7.5]], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_tangent_of_a_number_that_is_added() -> None:
    """torch treats a tensor without dims as a number; each example of a batch is treated alike."""
    numbers = torch.tensor([8.0, -8.0], dtype=torch.float64)

    def f(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch._foreach_add([x], number))

    def pushed(x: Tensor, number: Tensor) -> Any:
        return tsfunc.jvp(f, (x, number), (torch.ones_like(x), torch.ones_like(number)))

    values, tangents = tsfunc.vmap(pushed)(X, numbers)
    for i, (x, number) in enumerate(zip(X, numbers, strict=True)):
        value, tangent = torch_pushed(f, [x, number], [torch.ones_like(x), torch.ones_like(number)])
        assert torch.equal(values[0][i], value) and torch.equal(tangents[0][i], tangent)


INDEX = torch.tensor([0, 0])
WRONG_IN_TORCH: dict[str, Any] = {
    "maximum": lambda x: torch._foreach_maximum([x], 8.0)[0],
    "minimum of numbers": lambda x: torch._foreach_minimum([x, x], [8.0, 9.0])[0],
    "scatter_reduce": lambda x: x.scatter_reduce(0, INDEX, x * 2, "prod"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRONG_IN_TORCH)
def test_tangents_that_are_wrong_in_torch(name: str) -> None:
    def f(x: Tensor) -> tuple[Tensor]:
        return (WRONG_IN_TORCH[name](x),)

    def pushed(x: Tensor) -> Any:
        value, tangent = tsfunc.jvp(f, (x,), (torch.ones_like(x),))
        return *value, *tangent

    want = [torch_pushed_by_pulling(f, [x], [torch.ones_like(x)]) for x in X]
    for x, (value, tangent) in zip(X, want, strict=True):
        try:
            assert not torch.allclose(torch_pushed(f, [x], [torch.ones_like(x)])[1], tangent)
        except NotDifferentiable:  # it has no tangent at all
            pass
        torch.testing.assert_close(pushed(x), (value, tangent))
    batch = tuple(torch.stack(parts) for parts in zip(*want, strict=True))
    torch.testing.assert_close(tsfunc.vmap(pushed)(X), batch)


def test_conditions_tested_by_backward_formulas() -> None:
    """Products with several zeros run as a batch if all examples have the same number of zeros."""

    def f(x: Tensor) -> Tensor:
        return torch.ones(2, dtype=torch.float64).scatter_reduce(0, INDEX, x, "prod").sum()

    def second(x: Tensor) -> Any:
        return tsfunc.grad(lambda x: tsfunc.grad(f)(x).sum())(x)

    torch.testing.assert_close(tsfunc.vmap(second)(X), torch.ones_like(X))
    zeros = X.clone()
    zeros[0] = 0
    with pytest.raises(tsfunc.errors.DataDependentError, match="has to return one Python value"):
        tsfunc.vmap(second)(zeros)
