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


# Entries whose gradient, as a program, is not compared.
PROGRAM_EXCEPTIONS = {
    "dropout rrelu fractional_max_pool": "the entry seeds the generator, which a program refuses",
    "AutogradFunction CustomOp": "NumPy reads the values of tensors, or no derivative is right",
    "householder_product ormqr": "torch's formula writes into values that autograd has saved",
    "linear_cross_entropy": "the second derivative of torch's operator is wrong",
    "subgradients_at_zero": "the second derivative of a norm at 0 is not defined",
    "sparse masked_select __getitem__.mask": "the number of results depends on data",
    "combinations tensor_split": "the number of results depends on data",
    "as_strided.partial_views": "a program needs the base of such a view",
    "multi_head_attention": "the entry computes in float32",
}


def is_compared(row: Row) -> bool:
    words = " ".join(PROGRAM_EXCEPTIONS).split()
    return not any(word in row.name for word in words)


def total(case: Any, place: int, x: Tensor) -> Any:
    """Return a scalar that depends on all results of a call, given one of its tensors."""
    args = [x if i == place else y for i, y in enumerate(case.tensors)]
    results = [y for y in case.call(*args) if y.is_floating_point() and y.numel()]
    weights = [torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape) for y in results]
    return sum((y.sin() * w).sum() for y, w in zip(results, weights, strict=True))


def check_derivatives_of_a_program(row: Row) -> None:
    for case in row.cases(torch.float64, 1, grad=True):
        place = next((i for i in case.differentiable if case.tensors[i].dtype is X.dtype), None)
        if place is None:
            continue
        gradient = tsfunc.grad(functools.partial(total, case, place))
        x = case.tensors[place].detach()
        t = torch.randn_like(x)
        try:
            pushed = tsfunc.jvp(gradient, (x,), (t,))
            pulled = tsfunc.vjp(gradient, x)[1](t)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # no second derivative, or no result to differentiate
        program: Any = tsfunc.specialize(gradient)
        torch.testing.assert_close(tsfunc.jvp(program, (x,), (t,)), pushed, equal_nan=True)
        torch.testing.assert_close(tsfunc.vjp(program, x)[1](t), pulled, equal_nan=True)


COMPARED = [row for row in ROWS if row.variant == FUNCTION and is_compared(row)]
ACTIVATIONS = [row for row in COMPARED if row.name.endswith(("silu", "mish", "hardsigmoid"))]


@pytest.mark.parametrize("row", [*COMPARED[5::90], *ACTIVATIONS], ids=lambda row: row.name)
def test_programs_of_some_gradients_are_differentiated(row: Row) -> None:
    check_derivatives_of_a_program(row)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated. Use `nn.functional.interpolate`")
@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row.name)
def test_programs_of_all_gradients_are_differentiated(row: Row) -> None:
    check_derivatives_of_a_program(row)


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
