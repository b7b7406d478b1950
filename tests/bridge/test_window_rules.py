"""Windows of symbolic sizes: programs for all sizes agree with the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tsfunc import MetaTensorType, specialize

WINDOWS: dict[str, Callable[[Tensor], Any]] = {
    "a mean over all": lambda x: F.avg_pool2d(x, x.shape[2:]),
    "the largest of all": lambda x: F.max_pool2d(x, x.shape[2:]),
    "a list of sizes": lambda x: F.avg_pool2d(x, [x.shape[2], 2]),
    "a keyword": lambda x: F.avg_pool2d(x, kernel_size=x.shape[2:]),
    "a size for each dim": lambda x: F.avg_pool2d(x, x.shape[2] // 2),
    "places": lambda x: F.max_pool2d(x, x.shape[2] // 2, 1, 1, return_indices=True),
    "steps": lambda x: F.max_pool2d(x, 2, stride=x.shape[0]),
    "gaps": lambda x: F.max_pool2d(x, 2, 1, 0, x.shape[0] // 2),
    "padding": lambda x: F.avg_pool2d(x, 5, 2, x.shape[0] // 2),
    "1 dim": lambda x: F.avg_pool1d(x[0], x.shape[3] // 2),
    "1 dim, the largest": lambda x: F.max_pool1d(x[0], x.shape[3], return_indices=True),
    "3 dims": lambda x: F.avg_pool3d(x, x.shape[1:]),
    "powers": lambda x: F.lp_pool2d(x, 2, (x.shape[2], x.shape[3])),
    "patches": lambda x: F.unfold(x, x.shape[2:]),
    "patches with steps": lambda x: F.unfold(x, (2, x.shape[3] // 2), stride=x.shape[0]),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", WINDOWS)
def test_one_program_for_all_sizes(name: str, memory_format: torch.memory_format) -> None:
    f = WINDOWS[name]
    g = specialize(f, {"x": MetaTensorType(["b", "c", "h", "w"])})
    for shape in ((2, 3, 7, 6), (3, 2, 8, 9), (4, 5, 9, 8)):
        x = torch.randn(shape).to(memory_format=memory_format)
        got, want = g(x), f(x)
        torch.testing.assert_close(got, want, check_stride=True)
    assert g.cache_info().programs == 1
