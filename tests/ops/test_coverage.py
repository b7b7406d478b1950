"""The law of vmap on rows of the operator database: a batch is the stacked loop.

The quick suite takes a sample of the rows, and slow tests take all. ``python -m tools.coverage``
tries more samples and dtypes, and writes ``docs/coverage.md``.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from tests.ops.database import FUNCTION, INPLACE, OUT, Row, rows
from tests.ops.exceptions import EXCEPTIONS
from tests.ops.sweep import VMAP, VMAP_VMAP, Mode, check_row, sweep
from tools.coverage import PAGES, page, share
from tools.sweeping import Result, Task, run_task

# Methods and Python operators call the same ATen operators as the functions.
CALLED = [row for row in rows() if row.variant in (FUNCTION, INPLACE, OUT)]
FLOAT = [row for row in CALLED if torch.float32 in row.dtypes]
is_right = functools.partial(check_row, sweep)


def other_type(row: Row) -> torch.dtype | None:
    """Return another of the row's dtypes: the same one in each run."""
    others = sorted((d for d in row.dtypes if d is not torch.float32), key=str)
    return random.Random(row.name).choice(others) if others else None


@pytest.mark.parametrize("row", FLOAT[7::80], ids=lambda row: row.name)
def test_a_sample(row: Row) -> None:
    is_right(row, torch.float32, VMAP, most=1)
    is_right(row, torch.float32, VMAP_VMAP, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [VMAP, VMAP_VMAP], ids=lambda mode: mode.name)
@pytest.mark.parametrize("row", FLOAT, ids=lambda row: row.name)
def test_every_row_in_float32(row: Row, mode: Mode) -> None:
    is_right(row, torch.float32, mode, most=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", CALLED, ids=lambda row: row.name)
def test_every_row_in_another_type(row: Row) -> None:
    dtype = other_type(row)
    if dtype is not None:
        is_right(row, dtype, VMAP, most=2)


@pytest.mark.parametrize("name", [name for name in EXCEPTIONS if not EXCEPTIONS[name].modes])
def test_exceptions_fail_under_torch_func_too(name: str) -> None:
    row = next(row for row in rows() if row.name == name)
    dtype = torch.int64 if EXCEPTIONS[name].dtypes else torch.float32
    case = next(row.cases(dtype, 1))
    want = torch.stack([case.call(*case.tensors)[0]] * 2)
    batch = [torch.stack([x, x]) for x in case.tensors]
    try:
        got = torch.func.vmap(case.call)(*batch)[0]
    except Exception:
        return
    assert got.dtype is not want.dtype


def test_a_task() -> None:
    result = run_task(Task("add", "float32", "vmap", most=1))
    assert result.verdict == "OK" and set(result.counts) == {"OK"}
    result = run_task(Task("NumpyNMSCustomOp", "float32", "vmap", most=1))
    assert result.verdict == "FAIL" and "data-dependent" in result.messages[0][2]


def test_the_page() -> None:
    results = [
        Result("add", "float32", "vmap", "OK", {"OK": 3}),
        Result("nonzero", "int64", "vmap", "SPLIT", {"SPLIT": 2}),
        Result("broken", "int64", "vmap", "WRONG", {"WRONG": 1}, [("WRONG", "", "1, not 2")]),
        Result("NumpyNMSCustomOp", "float32", "vmap", "FAIL", {"FAIL": 1}),
        Result("full", "float32", "vmap", "NONE"),
        Result("fft.fft", "float64", "vmap(grad)", "OK", {"OK": 4}, most=2),
    ]
    plain, derivative = PAGES
    written = page(plain, results)
    assert share(results) == 60
    assert "| float32 | 1 | 0 | 0 | 0 | 1 | 0 | 1 | 50.00 % |" in written
    assert "**not explained**: 1, not 2" in written
    assert "depends on the data" in written
    assert "fft" not in written

    written = page(derivative, results)
    assert "# Derivatives of" in written and "## Higher derivatives" in written
    assert "## `vmap(grad)`" in written and "## `vmap`" not in written
    assert "| float64 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 100.00 % |" in written
    assert "At most 2 samples of a row." in written and "Nothing." in written
