"""The fused operators of weight normalisation, against the loop over them."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import check


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim: int) -> None:
    v = torch.randn(4, 3)
    g = torch.randn(4, 1) if dim == 0 else torch.randn(1, 3)
    assert check(torch.ops.aten._weight_norm_interface.default, v, g, dim)
    _, norms = torch.ops.aten._weight_norm_interface(v, g, dim)
    backward = torch.ops.aten._weight_norm_interface_backward.default
    assert check(backward, torch.randn(4, 3), v, g, norms, dim, choices=[(0,), (0, 2), (2,)])
    # ``v`` and its norms belong together: a call of the operator batches both or neither.
    assert check(backward, torch.randn(4, 3), v, g, norms, dim)
