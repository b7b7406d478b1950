"""Pooling, resampling and patches against the loop, for calls that torch's own tests make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import tsfunc
from tests.ops.harness import check, database_calls, uniform
from tsfunc.ops.registry import find

aten = torch.ops.aten

NAMES = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool1d max_unpool2d
    max_unpool3d interpolate grid_sample
    unfold fold
""".split()
ENTRIES = [e for e in op_db if e.name in {f"nn.functional.{name}" for name in NAMES}]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.name}.{e.variant_test_name}")
def test_database(entry: Any) -> None:
    torch.manual_seed(0)
    covered = 0
    for call in database_calls(entry, torch.float64, most=6):
        row = find(call.op.name())
        if row is None or row.rule is None or "tsfunc/ops/batched.py" not in row.source:
            continue
        # All examples share the indices, which point into the sample.
        tensors = [a for a in call.args if isinstance(a, torch.Tensor)]
        floats = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
        choices = [floats, floats[:1]]
        covered += check(call.op, *call.args, choices=choices, **call.kwargs)
    assert covered


@pytest.mark.parametrize("n", [2, 3])
def test_grid_sampler(n: int) -> None:
    x, grid = uniform(2, 4, *[5] * n), uniform(2, *[3] * n, n) * 2 - 1
    forward = getattr(aten, f"grid_sampler_{n}d").default
    backward = getattr(aten, f"grid_sampler_{n}d_backward").default
    assert check(forward, x, grid, 0, 0, False)
    grad = uniform(2, 4, *[3] * n)
    for mask in ([True, True], [False, True]):
        assert check(backward, grad, x, grid, 0, 0, True, mask)


def test_affine_grid() -> None:
    assert check(aten.affine_grid_generator.default, uniform(2, 2, 3), [2, 3, 4, 5], True)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_patches(lead: tuple[int, ...]) -> None:
    args = ([2, 2], [1, 1], [0, 0], [1, 1])
    assert check(aten.im2col.default, uniform(*lead, 3, 4, 4), *args)
    assert check(aten.col2im.default, uniform(*lead, 12, 9), [4, 4], *args)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_interpolation_is_one_kernel(mode: str, dtype: torch.dtype) -> None:
    """One kernel serves the batch: the kernel for bytes rounds differently."""
    x = torch.randint(0, 255, (3, 2, 3, 9, 9), generator=torch.Generator().manual_seed(0)).to(dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, (11, 7), mode=mode)

    for at in (0, 2, -1):
        want = torch.stack([f(example) for example in x])
        torch.testing.assert_close(tsfunc.vmap(f, at)(x.movedim(0, at)), want)
    report = tsfunc.explain(tsfunc.vmap(f), x).to_dict()
    assert len(report["operators"]) <= 2
