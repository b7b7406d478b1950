"""Training steps in files and in exported programs, which can't contain an optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tsfunc
from tsfunc.errors import ExportError


def test_a_step_with_an_optimizer_is_not_in_files(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    @tsfunc.specialize
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step(torch.randn(3, 4))
    advice = r"as a function of the parameters .* \(tsfunc.grad, tsfunc.functional_optimizer\)"
    with pytest.raises(ValueError, match=rf"reads .*\.grad, and a file has no place .*{advice}"):
        step.save(tmp_path / "step.tsf")
    with pytest.raises(ExportError, match=rf"cannot hold attributes of tensors. .*{advice}"):
        step.program.to_exported_program()


RESUMED = """
import sys, torch, tsfunc
step, (weights, state, x, y) = tsfunc.load(sys.argv[1]), torch.load(sys.argv[2])
for _ in range(3):
    weights, state, loss = step(weights, state, x, y)
torch.save((weights, state, loss), sys.argv[2])
"""


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=["adam", "sgd"])
def test_a_functional_step_goes_on_in_another_process(kind: Any, tmp_path: Path) -> None:
    """Parameters and the optimizer's state are arguments and results of the saved program."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    options = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
    optimizer = tsfunc.functional_optimizer(kind, **options)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        error: Tensor = tsfunc.functional_call(model, weights, (x,)) - y
        return error.square().mean()

    @tsfunc.specialize
    def step(
        weights: dict[str, Tensor], state: dict[str, dict[str, Tensor]], x: Tensor, y: Tensor
    ) -> Any:
        grads, value = tsfunc.grad_and_value(loss)(weights, x, y)
        return *optimizer.step(weights, grads, state), value

    x, y = torch.randn(8, 4), torch.randn(8, 1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights, state, _ = step(weights, optimizer.init(weights), x, y)
    step.save(tmp_path / "step.tsf")
    torch.save((weights, state, x, y), tmp_path / "state.pt")
    paths = str(tmp_path / "step.tsf"), str(tmp_path / "state.pt")
    subprocess.run([sys.executable, "-c", RESUMED, *paths], check=True)
    weights, state, value = torch.load(tmp_path / "state.pt")
    trained = kind(model.parameters(), **options)
    for _ in range(4):
        trained.zero_grad()
        expected = (model(x) - y).square().mean()
        expected.backward()
        trained.step()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(weights, {k: p.detach() for k, p in model.named_parameters()})
