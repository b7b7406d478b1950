"""The digits example runs, its step is private SGD, and its privacy figure is a true bound."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tsfunc
from examples import digits

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *options: str) -> dict[str, float]:
    """Run the example in a folder; return the accuracies and speeds that it prints, by name."""
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^(\S.*?)  +(?:held-out accuracy)? *([\d.,]+)(?: images/s)?$", done.stdout, re.M
    )
    return {name: float(figure.replace(",", "")) for name, figure in found}


def test_quick_run(tmp_path: Path) -> None:
    figures = run(tmp_path, "--quick")
    assert list(figures) == [
        "no noise",
        "private",
        "ensemble",
        "tsfunc, specialized",
        "tsfunc",
        "torch.func",
        "a loop over the examples",
    ]
    assert all(figure > 0 for figure in figures.values())
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_accuracy(tmp_path: Path, seed: str) -> None:
    figures = run(tmp_path, "--no-plot", "--seed", seed)
    assert figures["no noise"] >= 0.93
    assert figures["private"] >= 0.88
    assert figures["ensemble"] >= 0.95
    assert not list(tmp_path.iterdir())


def inputs(count: int = 6) -> tuple[digits.Params, Tensor, Tensor, Tensor]:
    params = {name: p.detach() for name, p in digits.network().named_parameters()}
    present = torch.ones(count)
    present[-2:] = 0
    return params, torch.rand(count, 1, 8, 8), torch.randint(10, (count,)), present


def plain_loop(
    params: digits.Params, images: Tensor, labels: Tensor, present: Tensor
) -> digits.Params:
    """Return the step without noise: backward passes of a module, summed in Python."""
    net = digits.network()
    net.load_state_dict(params)
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for image, label in zip(images[present > 0], labels[present > 0], strict=True):
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(image[None])[0], label).backward()
        grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
        for name, g in grads.items():
            total[name] += g * min(1.0, digits.CLIP / norm)
    return {name: p - digits.RATE / digits.BATCH * total[name] for name, p in params.items()}


@pytest.mark.parametrize("specialized", [False, True], ids=["eager", "specialized"])
def test_step_is_the_plain_loop(specialized: bool) -> None:
    args = inputs()
    step = digits.make_step(digits.mapped_gradients(), 0.0)
    if specialized:
        step = tsfunc.specialize(step)
    torch.testing.assert_close(step(*args), plain_loop(*args))


def test_gradients_are_clipped() -> None:
    """Some gradient norms exceed the clip norm, and others do not."""
    params, images, labels, _ = inputs()
    grads = digits.mapped_gradients()(params, images, labels)
    norms = torch.cat([g.flatten(1) for g in grads.values()], 1).norm(dim=1)
    assert norms.max() > digits.CLIP


def test_noise_is_fresh_and_of_its_size() -> None:
    """Repeated calls draw new noise, of the given standard deviation."""
    args = inputs()
    exact = digits.make_step(digits.mapped_gradients(), 0.0)(*args)
    step = tsfunc.specialize(digits.make_step(digits.mapped_gradients(), 3.0))
    draws = []
    for _ in range(4):
        new = step(*args)
        draws.append(torch.cat([(new[k] - exact[k]).flatten() for k in exact]))
    noise = torch.stack(draws) / (digits.RATE / digits.BATCH * digits.CLIP)
    torch.testing.assert_close(noise.std(1), torch.full((4,), 3.0), rtol=0.05, atol=0)
    assert torch.corrcoef(noise).triu(1).abs().max() < 0.1


def test_padding_changes_nothing() -> None:
    params, images, labels, present = inputs()
    step = digits.make_step(digits.mapped_gradients(), 0.0)
    alone = step(params, images[:4], labels[:4], present[:4])
    torch.testing.assert_close(step(params, images, labels, present), alone)


def exact_delta(epsilon: float, noise: float, rate: float, steps: int) -> float:
    """Return the least delta at an epsilon: the privacy losses' distribution, convolved on a grid.

    It is for removing an image, the worse of both directions.
    """
    width, reach = 1e-3, 40.0
    size = round(2 * reach / width)
    x = torch.linspace(-10 * noise, 10 * noise + 1, 200_001, dtype=torch.float64)
    without = torch.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    likelihood = 1 - rate + rate * torch.exp((2 * x - 1) / (2 * noise**2))
    places = (likelihood.log() / width).round().long() % size  # losses below 0 are at the end
    masses = without * likelihood * (x[1] - x[0])
    density = torch.zeros(size, dtype=torch.float64).index_add(0, places, masses)
    total = torch.fft.irfft(torch.fft.rfft(density) ** steps, n=size)
    losses = (torch.arange(size, dtype=torch.float64) * width + reach) % (2 * reach) - reach
    return float((total * (1 - torch.exp(epsilon - losses)).clamp(min=0)).sum())


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(2.0, 128 / 1347, 330), (1.2, 1 / 12, 180), (1.0, 0.1, 1)]
)
def test_epsilon_is_a_bound_and_close(noise: float, rate: float, steps: int) -> None:
    delta = 1e-4
    spent = digits.epsilon(noise, rate, steps, delta)
    assert exact_delta(spent, noise, rate, steps) <= delta
    assert exact_delta(0.65 * spent, noise, rate, steps) > delta
