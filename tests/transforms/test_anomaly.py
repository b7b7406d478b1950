"""torch's anomaly mode, which reads every gradient, also those that are tracers."""

from __future__ import annotations

import pytest
import torch

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
