"""A decomposition that has derivatives computes what its operator computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.harness import overload
from tests.ops.test_registry import seeded_calls
from tsfunc.ops.differentiable_decompositions import BACKWARD_DECOMPOSED, DECOMPOSED

ALL = {**DECOMPOSED, **BACKWARD_DECOMPOSED}


def copied(args: list[Any]) -> list[Any]:
    return [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]


def results(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(ALL))
def test_values_and_dtypes(name: str, dtype: torch.dtype) -> None:
    for args, kwargs in seeded_calls(name):
        args = [
            arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
            for arg in args
        ]
        want = results(overload(name)(*copied(args), **kwargs))
        found = ALL[name](*copied(args), **kwargs)
        if found is NotImplemented:
            continue
        for mine, theirs in zip(results(found), want, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None and theirs.numel():
                torch.testing.assert_close(mine, theirs, equal_nan=True)
