"""The example of a user's transform computes bounds, and needs the public API only."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tsfunc
from tsfunc import grad, jvp, vmap

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "new_transform.py"

Interval = Callable[[Callable[..., Any]], Callable[..., tuple[torch.Tensor, torch.Tensor]]]


@pytest.fixture(scope="module")
def interval() -> Interval:
    # Run it once in a process, since it defines a key.
    return runpy.run_path(str(EXAMPLE))["interval"]


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y + torch.exp(x) * 2.0


values = st.floats(-2, 2, width=32)
intervals = st.lists(st.tuples(values, values), min_size=2, max_size=2)


@given(intervals, st.floats(0, 1), st.floats(0, 1))
def test_the_bounds_hold(
    interval: Interval, ends: list[tuple[float, float]], a: float, b: float
) -> None:
    pairs = [(torch.tensor(min(e)), torch.tensor(max(e))) for e in ends]
    low, high = interval(f)(*pairs)
    inside = [lo + (hi - lo) * at for (lo, hi), at in zip(pairs, (a, b), strict=True)]
    value = f(*inside)
    assert low - 1e-4 <= value <= high + 1e-4


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    low = torch.randn(shape)
    return low, low + torch.rand(shape)


def test_it_composes_with_vmap_both_ways_and_nested(interval: Interval) -> None:
    x, y = batch(4, 3), batch(4, 3)
    expected = interval(f)(x, y)
    for composed in (
        vmap(interval(f)),
        interval(vmap(f)),
        vmap(vmap(interval(f))),
        interval(vmap(vmap(f))),
        vmap(interval(vmap(f))),
    ):
        torch.testing.assert_close(composed(x, y), expected)


def test_vmap_inside_of_it_with_other_dims(interval: Interval) -> None:
    x, y = batch(3, 4), batch(3)
    found = interval(vmap(f, in_dims=(1, None), out_dims=1))(x, y)
    torch.testing.assert_close(found, interval(f)(x, tuple(end[:, None] for end in y)))


def test_constants_of_an_outer_vmap_are_points(interval: Interval) -> None:
    x, scale = batch(3), torch.tensor([-1.0, 2.0])
    low, high = vmap(lambda s: interval(lambda v: v * s)(x))(scale)
    torch.testing.assert_close(low, torch.stack([-x[1], 2 * x[0]]))
    torch.testing.assert_close(high, torch.stack([-x[0], 2 * x[1]]))


def test_its_bounds_can_be_differentiated(interval: Interval) -> None:
    x = torch.tensor([0.5, 1.0])

    def width(x: torch.Tensor) -> torch.Tensor:
        low, high = interval(lambda v: v * torch.exp(v))((x, x + 1))
        return (high - low).sum()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return ((x + 1) * torch.exp(x + 1) - x * torch.exp(x)).sum()

    torch.testing.assert_close(grad(width)(x), grad(plain)(x))
    torch.testing.assert_close(vmap(grad(width))(x), grad(plain)(x))
    torch.testing.assert_close(jvp(width, (x,), (x,)), jvp(plain, (x,), (x,)))


def test_an_operator_that_it_does_not_know_is_refused(interval: Interval) -> None:
    with pytest.raises(NotImplementedError, match="interval: aten::sin has no kernel"):
        interval(torch.sin)(batch(2))


def test_it_is_short_and_takes_the_public_api_only() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 60
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("tsfunc.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.module.startswith("tsfunc.")
            if node.module == "tsfunc":
                assert {alias.name for alias in node.names} <= set(tsfunc.__all__)
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
            if isinstance(node.value, ast.Name) and node.value.id == "dispatch":
                assert node.attr in tsfunc.dispatch.__all__


def test_it_runs_as_a_script() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("bounds of x * exp(x): tensor([-2.7183,  0.0000, 14.7781])")
