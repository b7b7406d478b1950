"""Batching rules on the calls of torch's own operator database, forward and backward.

The database covers cases that hand-written samples lack: odd strides, omitted defaults, empty
tensors.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.ops.harness import check, database_calls, rows_of
from tsfunc.ops import find

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

FILES = (
    "tensor_iterator.py",
    "reductions.py",
    "identity.py",
    "views.py",
    "n_dimensional.py",
    "factories.py",
    "variadic.py",
)
# Entries with undefined results, and changes of metadata that the harness can't compare.
APART = {
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::unsqueeze_",
    "aten::squeeze_",
    "aten::squeeze_.dim",
    "aten::squeeze_.dims",
    "aten::transpose_",
    "aten::t_",
    "aten::detach_",
    "aten::resize_",  # refused if examples are not contiguous; another test covers it
}
ROWS = set(rows_of(*FILES)) - APART
# Dense tensors only; jiterator needs a GPU.
ENTRIES = [info for info in op_db if "sparse" not in info.name and "jiterator" not in info.name]


def _has_tensor(args: Any) -> bool:
    return any(
        isinstance(arg, torch.Tensor) or (isinstance(arg, (list, tuple)) and _has_tensor(arg))
        for arg in args
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["float", "int"])
@pytest.mark.parametrize("info", ENTRIES, ids=lambda info: info.full_name)
def test_calls_of_the_database(info: Any, dtype: torch.dtype) -> None:
    if dtype not in info.supported_dtypes("cpu"):
        pytest.skip(f"{info.full_name} has no samples of {dtype}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in database_calls(info, dtype, most=8):
            if call.op.name() in ROWS and _has_tensor(call.args):
                row = find(call.op.name())
                assert row is not None
                check(call.op, *call.args, **call.kwargs)
