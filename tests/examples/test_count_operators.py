"""The example that counts operators sees those of every call, under every transform."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tsfunc import grad, jvp, specialize, vmap

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "count_operators.py"


@pytest.fixture(scope="module")
def count() -> Callable[..., Counter[str]]:
    return runpy.run_path(str(EXAMPLE))["count"]


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * torch.ones(3).exp()


@pytest.mark.parametrize("size", [1, 4])
def test_a_loop_calls_each_operator_for_each_example_and_vmap_calls_it_once(
    count: Callable[..., Counter[str]], size: int
) -> None:
    x = torch.randn(size, 3)
    one = count(f, x[0])
    assert one == {"aten::sin": 1, "aten::ones": 1, "aten::exp": 1, "aten::mul.Tensor": 1}
    looped = count(lambda: [f(example) for example in x])
    mapped = count(vmap(f), x)
    for name in one:
        assert looped[name] == size * mapped[name] == size


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(lambda x: f(x).sum()),
        lambda f: lambda x: jvp(f, (x,), (x,)),
        lambda f: vmap(grad(lambda x: f(x).sum())),
    ],
    ids=["grad", "jvp", "vmap of grad"],
)
def test_operators_of_derivatives_are_counted(
    count: Callable[..., Counter[str]], transform: Callable[..., Any]
) -> None:
    calls = count(transform(f), torch.randn(4, 3))
    assert calls["aten::sin"] == calls["aten::cos"] == calls["aten::exp"] == 1


def test_the_operators_of_a_program_are_counted(count: Callable[..., Counter[str]]) -> None:
    program = specialize(vmap(f))
    program(torch.randn(4, 3))
    calls = count(program, torch.randn(4, 3))
    assert calls["aten::sin"] == calls["aten::mul.Tensor"] == 1


def test_it_runs_as_a_script() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("one example: {'aten::sin': 1, 'aten::ones': 1, 'aten::exp': 1")
