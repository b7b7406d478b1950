"""Products of scaled float8 matrices, against the loop over the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.harness import check
from tsfunc import vmap

F8 = torch.float8_e4m3fn
SCALED, SCALED_2 = torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 16).to(F8), torch.randn(32, 16).to(F8).t()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_one_scale_each(dtype: torch.dtype | None) -> None:
    a, b = matrices()
    scale, other = torch.tensor(0.5), torch.tensor(3.7)
    bias = torch.randn(32, dtype=torch.float32 if dtype is None else dtype)
    assert check(SCALED, a, b, scale, other, None, None, dtype)
    assert check(SCALED, a, b, scale, other, bias, None, dtype)
    assert check(SCALED, a, b, scale, other, bias, torch.tensor(2.5), dtype, choices=[(0,)])


@pytest.mark.parametrize("by_row", [False, True])
def test_lists_of_scales(by_row: bool) -> None:
    a, b = matrices()
    scale, other = (torch.rand(5, 1), torch.rand(1, 32)) if by_row else torch.rand(2)
    kind, plain = [int(by_row)], [0]
    args: tuple[Any, ...] = (
        a, b, [scale], kind, plain, [other], kind, plain, None, torch.bfloat16,
    )  # fmt: skip
    assert check(SCALED_2, *args)


def test_rows_of_all_examples_are_one_matrix() -> None:
    """If all other arguments are equal, one call of the kernel serves the rows of all examples."""
    a, b = torch.randn(3, 5, 16).to(F8), matrices()[1]
    scale = torch.tensor(0.5)
    out = vmap(lambda a: torch._scaled_mm(a, b, scale, scale), strict=True)(a)
    for one, found in zip(a, out, strict=True):
        assert torch._scaled_mm(one, b, scale, scale).float().equal(found.float())
