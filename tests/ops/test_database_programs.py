"""The operator database as programs with every size named that may have a name.

A program that is traced for one sample is to agree with the operator at three other sizes.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.ops.database import FUNCTION, Row, rows
from tests.ops.named_dims import at_shapes, named
from tests.ops.named_sweep import NAMED_APART, judge
from tests.ops.sweep import Verdict

# Why these have no such program, by the cause; those beside are expected to have one.
EXCEPTIONS = {
    # What they return, or whether they return, depends on their data.
    "corrcoef": "data", "cov": "data", "linalg.lstsq": "data", "nn.functional.ctc_loss": "data",
    "linalg.lstsq.grad_oriented": "data", "nn.functional.gaussian_nll_loss": "data",
    "tensor_split": "data",
    # They branch in Python on which of two sizes is larger.
    "pca_lowrank": "course", "svd_lowrank": "course",
    # torch has no rule for fake tensors, or one that does not take symbolic sizes, and no
    # expression was found by example.
    "histogramdd": "no rule", "sparse.mm.reduce": "no rule", "_chunk_cat": "no rule",
    "istft": "no rule", "torch._scaled_mm_v2": "no rule", "_upsample_bilinear2d_aa": "no rule",
    "combinations": "no expression", "diagonal_copy": "no expression",
    "unfold_copy": "no expression", "nn.functional.adaptive_max_pool3d": "no expression",
    # The names that are found for them are more than hold for every sample.
    "nn.functional.linear_cross_entropy.chunked": "names",
    "nn.functional.linear_cross_entropy.chunked_none": "names",
    # They resize their argument, which a fake tensor with symbolic sizes can't be.
    "resize_": "resize", "resize_as_": "resize",
    # Their kernels read memory that is not theirs where lengths do not fit.
    "nn.functional.batch_norm.without_cudnn": "crash", "nn.functional.embedding_bag": "unchecked",
    "torch.ops.aten._efficient_attention_forward": "crash",
    "torch.ops.aten._flash_attention_forward": "crash",
}  # fmt: skip

ROWS = [
    row for row in rows()
    if row.variant == FUNCTION and not row.name.startswith(("_foreach", "extra.", "Numpy"))
]  # fmt: skip
QUICK = [
    row for row in ROWS
    if row.name in ("add", "mm", "cat", "sum", "fft.fft", "softmax", "linalg.solve", "where",
                    "diag", "nn.functional.linear", "transpose", "nn.functional.layer_norm")
]  # fmt: skip


def _dtype(row: Row) -> torch.dtype:
    wanted = (torch.float32, torch.complex64, torch.int64)
    return next((d for d in wanted if d in row.dtypes), min(row.dtypes, key=str))


def run(row: Row) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [case for case in row.cases(_dtype(row), 2) if case.tensors]
        found = [judge(case, row.entry, NAMED_APART) for case in cases]
        return [f"{x.what} {x.message}" for x in found if x.verdict > Verdict.OK]


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_some_entries(row: Row) -> None:
    assert run(row) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_entry(row: Row) -> None:
    if row.name in EXCEPTIONS:
        pytest.skip(f"{row.name}: {EXCEPTIONS[row.name]}")
    assert run(row) == []


def test_names_are_found_by_asking() -> None:
    (matmul,) = (row for row in ROWS if row.name == "mm")
    case = next(iter(matmul.cases(torch.float32, 1)))
    found = named(case)
    assert found is not None and len(found.others) == 3
    names = found.names
    assert names[0, 1] == names[1, 0] and len(set(names.values())) == 3
    inputs = at_shapes(case.tensors, found.others[0])
    assert [tuple(x.shape) for x in inputs] == [tuple(shape) for shape in found.others[0]]
