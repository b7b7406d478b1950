"""The law of the derivative modes on every row of the operator database: a batch is the loop.

A sample of the rows, and the whole in slow tests; ``tools/sweeping`` tries more samples of each.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.ops.database import FUNCTION, INPLACE, Row, rows
from tests.ops.derivative_sweep import sweep
from tests.ops.derivatives import MODES, torch_pushed, torch_pushed_by_pulling
from tests.ops.sweep import Mode, Verdict

ROWS = [
    row
    for row in rows()
    if row.variant in (FUNCTION, INPLACE) and torch.float64 in row.differentiable
]
OTHERS = (torch.float32, torch.complex128, torch.complex64, torch.bfloat16)
RIGHT = (Verdict.OK, Verdict.SPLIT, Verdict.NONE)

_RULE = "the rule that the database registers for it takes one argument, the operator has two"
_REFUSED = "randomness='same' refuses a distribution of each example's own, as torch.func does"
_PARSED = (
    "with a list that is not batched Python asks the number for its value before anybody sees the "
    'call: refused, and under data_dependent="split" without its derivative'
)
_SPARSE = "torch has no kernel for a batch of such sparse matrices: a loop, with a warning"

# Rows that are not right, in a mode or in all, and why.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("NumpyCatCustomOp", ""): _RULE,
    ("NumpySplitCopyCustomOp", "vmap(grad)"): _RULE,
    ("NumpySplitCopyWithIntCustomOp", "vmap(grad)"): _RULE,
    ("_foreach_add (inplace)", "grad(vmap)"): _PARSED,
    ("bernoulli", ""): _REFUSED,
    ("normal", ""): _REFUSED,
    ("normal.number_mean", ""): _REFUSED,
    ("sparse.mm.reduce", "vmap(grad)"): _SPARSE,
    ("to_sparse", "vmap(jvp)"): _SPARSE,
    ("sparse.sampled_addmm", "vmap(grad)"): _SPARSE,
}


def is_right(row: Row, dtype: torch.dtype, mode: Mode, most: int) -> None:
    if EXCEPTIONS.keys() & {(row.name, mode.name), (row.name, "")}:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for outcome in sweep(row, dtype, mode, most):
            assert outcome.verdict in RIGHT, (outcome.verdict.name, outcome.what, outcome.message)


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


NUMBER = torch.tensor(8.0, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["_foreach_add", "_foreach_maximum", "_foreach_minimum"])
def test_tangents_of_lists(name: str) -> None:
    """They are those of each example alone, also where these are not those of torch's pullback."""
    x = torch.tensor([[7.0, 9.0], [8.5, 7.5]], dtype=torch.float64)
    primals = (x, torch.stack([NUMBER, -NUMBER])) if name == "_foreach_add" else (x,)

    def f(x: Tensor, number: Any = 8.0) -> tuple[Tensor, ...]:
        return tuple(getattr(torch, name)([x], number))

    def pushed(*given: Tensor) -> Any:
        half = len(given) // 2
        return tsfunc.jvp(f, given[:half], given[half:])

    tangents = [torch.ones_like(primal) for primal in primals]
    values, found = tsfunc.vmap(pushed)(*primals, *tangents)
    for i in range(len(x)):
        one, ones = [p[i] for p in primals], [t[i] for t in tangents]
        value, tangent = torch_pushed(f, one, ones)
        _, right = torch_pushed_by_pulling(f, one, ones)
        assert torch.equal(values[0][i], value) and torch.equal(found[0][i], tangent)
        assert not torch.allclose(tangent, right)
