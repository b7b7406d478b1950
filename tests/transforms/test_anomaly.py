"""torch's anomaly mode, which reads every gradient, tracers included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, vmap


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_sound_gradients_pass() -> None:
    x = torch.rand(3, 4)
    with torch.autograd.set_detect_anomaly(True):
        torch.testing.assert_close(vmap(grad(lambda a: a.sin().sum()))(x), x.cos())


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_a_nan_in_one_example_is_found() -> None:
    x = torch.tensor([1.0, -1.0])
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"),
    ):
        vmap(grad(lambda a: a.sqrt()))(x)


@pytest.mark.parametrize("depth", [1, 2])
def test_torchs_own_checks_are_of_all_examples(depth: int) -> None:
    """TORCH_CHECK_TENSOR_ALL needs one answer for all examples."""

    def func(x: Tensor) -> Tensor:
        torch._test_check_tensor(x >= 0)
        return x * 2

    mapped: Any = func
    for _ in range(depth):
        mapped = vmap(mapped)
    x = torch.ones(3, 2, 4)
    torch.testing.assert_close(mapped(x), x * 2)
    x[1, 0, 3] = -1
    with pytest.raises(RuntimeError, match="Test message for TORCH_CHECK_TENSOR_ALL"):
        mapped(x)
