"""Functions that need several assumptions: the results of the first call, and its traces."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.program.assumptions import Assumptions, Retrace, trace_until_valid
from tsfunc.program.calling.capture import capture
from tsfunc.types import Dim


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Assumptions]:
    """Return the assumptions of each trace."""
    seen: list[Assumptions] = []

    def counted(request: Any, instances: Any = None) -> Any:
        seen.append(request.assumptions)
        return capture(request, instances)

    monkeypatch.setattr("tsfunc.program.calling.cache_miss.capture", counted)
    return seen


class Part:
    """A part of a function, and the traces that it adds to a first call.

    Each part makes its own state, so that the function and its specialized form can't share it.
    """

    def __init__(self, traces: int, make: Callable[[], Callable[[Tensor, Tensor, int], Any]]):
        self.traces, self.make = traces, make


def backward() -> Callable[[Tensor, Tensor, int], Any]:
    def run(x: Tensor, y: Tensor, k: int) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf * W).sum() + (W * leaf).sin().sum(), [W])[0]

    return run


def stored() -> Callable[[Tensor, Tensor, int], Any]:
    seen: dict[str, Any] = {"last": None}

    def run(x: Tensor, y: Tensor, k: int) -> Any:
        seen["last"] = x * 2
        return x + 1

    return run


def compared() -> Callable[[Tensor, Tensor, int], Any]:
    own = SimpleNamespace(w=W)

    def run(x: Tensor, y: Tensor, k: int) -> Any:
        return x * 3 if y is own.w else x * 5

    return run


def at_the_edge() -> Callable[[Tensor, Tensor, int], Any]:
    def run(x: Tensor, y: Tensor, k: int) -> Any:
        return torch.nn.functional.pad(x, (0, 0, 2, 2)).unfold(0, 3, 1).sum(-1)

    return run


def hashed() -> Callable[[Tensor, Tensor, int], Any]:
    table = {3: 2.0}

    def run(x: Tensor, y: Tensor, k: int) -> Any:
        return x * table.get(k, 0.5)

    return run


W = torch.tensor([1.0, -2.0], requires_grad=True)
PARTS = {
    "backward": Part(1, backward),
    "stored": Part(0, stored),
    "compared": Part(1, compared),
    "edge": Part(0, at_the_edge),
    "hashed": Part(1, hashed),
}


def of_parts(names: list[str]) -> Callable[[Tensor, Tensor, int], list[Any]]:
    runs = [PARTS[name].make() for name in names]

    def f(x: Tensor, y: Tensor, k: int) -> list[Any]:
        return [run(x, y, k) for run in runs]

    return f


@pytest.mark.parametrize("_", range(12))
def test_each_assumption_costs_one_trace(_: int, traces: list[Assumptions]) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    names = draw.sample(list(PARTS), draw.randint(1, len(PARTS)))
    print(names)
    f = of_parts(names)
    s = specialize(f, {"x": Meta(["n", 2]), "y": Tensor, "k": int})
    for first, size in enumerate((draw.randint(2, 9), draw.choice((0, 1)))):
        traces.clear()
        x = torch.randn(size, 2)
        torch.testing.assert_close(s(x, W, 3), f(x, W, 3))
        allowed = 1 + sum(PARTS[name].traces for name in names)
        allowed += first  # another trace fixes a size of 0 or 1, and is compared
        assert 1 <= len(traces) <= allowed, traces
        if first and "backward" in names:
            assert all(each.records_autograd for each in traces)  # remembered


def test_a_remembered_assumption_that_does_not_hold_is_dropped(traces: list[Assumptions]) -> None:
    def f(x: Tensor, learns: bool) -> Any:
        loss = (x * W).sum()
        return torch.autograd.grad(loss, [W])[0] if learns else torch.nn.functional.linear(x, x)

    s = specialize(f)
    x = torch.randn(3, 2)
    torch.testing.assert_close(s(x, True), f(x, True))
    assert [each.records_autograd for each in traces] == [False, True]
    torch.testing.assert_close(s(x, False), f(x, False))
    assert [each.records_autograd for each in traces] == [False, True, True, False]
    assert "linear" in str(s.program)  # without autograd's operators
    torch.testing.assert_close(s(x[1:], True), f(x[1:], True))
    assert [each.records_autograd for each in traces[4:]] == [False, True]


def test_the_steps_of_assumptions_end() -> None:
    """Random sequences of assumptions, each following from the last one, come to an end."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    names = ["a", "b", "c"]

    def following(held: Assumptions) -> Assumptions:
        changes: dict[str, Any] = draw.choice([
            {"varying": frozenset(draw.sample(names, draw.randrange(3)))},
            {"narrowed": held.narrowed + 1, "dims": {"a": Dim("n", min=3)}},
            {"closure_numbers": draw.random() < 0.5},
            {"described_numbers": draw.random() < 0.5},
            {"fixed": frozenset(draw.sample(names, draw.randrange(4)))},
            {"other_hints": frozenset(draw.sample(names, draw.randrange(4)))},
            {"guards_changed": draw.random() < 0.5},
            {"records_autograd": draw.random() < 0.5},
            {"autograd_is_remembered": False, "records_autograd": False},
            {"compares_identity": draw.random() < 0.5},
        ])  # fmt: skip
        return held.with_changes(**changes)

    count = 0

    def trace(held: Assumptions) -> None:
        nonlocal count
        count += 1
        assert count < 100
        for _ in range(200):
            other = following(held)
            if held.is_followed_by(other) and other.narrowed <= 2:
                assert not other.is_followed_by(held)
                raise Retrace(other)

    trace_until_valid(
        trace,
        Assumptions(varying=frozenset(names), records_autograd=True, autograd_is_remembered=True),
    )
    assert count > 1


def test_a_step_back_is_an_error() -> None:
    def trace(held: Assumptions) -> None:
        raise Retrace(dataclasses.replace(held, records_autograd=False))

    with pytest.raises(AssertionError):
        trace_until_valid(trace, Assumptions(records_autograd=True))
