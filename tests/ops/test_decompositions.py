"""A decomposition that has derivatives computes what its operator computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tests.ops.harness import overload
from tests.ops.test_registry import seeded_calls
from tsfunc.ops.differentiable_decompositions import BACKWARD_DECOMPOSED, DECOMPOSED
from tsfunc.testing import check_grads

ALL = {**DECOMPOSED, **BACKWARD_DECOMPOSED}


def with_true_norms(args: list[Any]) -> list[Any]:
    """The norms that a weight norm saves are those of its weight, which the decomposition reads."""
    cotangent, v, g, _, dim = args
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    norms = torch.linalg.vector_norm(v, 2, dims, True) if dims else v.abs()
    return [cotangent, v, g, norms, dim]


# Arguments that belong together.
RELATED = {"aten::_weight_norm_differentiable_backward": with_true_norms}


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
        args = RELATED.get(name, list)(args)
        want = results(overload(name)(*copied(args), **kwargs))
        found = ALL[name](*copied(args), **kwargs)
        if found is NotImplemented:
            continue
        for mine, theirs in zip(results(found), want, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None and theirs.numel():
                torch.testing.assert_close(mine, theirs, equal_nan=True)


X = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COTANGENT = X.flip(0, 1).exp()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4, 2), COTANGENT[0], COTANGENT[1]),
    "layer_norm of one dim": lambda x: F.layer_norm(x, (2,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, COTANGENT[0, :, 0], training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (4, 2)),
    "glu": lambda x: F.glu(x, 1).repeat(1, 2, 1),
    "softmax": lambda x: x.softmax(1),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True).expand_as(x),
    "cumprod": lambda x: x.cumprod(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_derivatives(name: str) -> None:
    """Against central differences of the first derivatives, in both modes."""
    check_grads(tsfunc.grad(lambda x: (FUNCTIONS[name](x) * COTANGENT).sum()), X)
