"""Side effects, exceptions and their effects."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.semantics.transform_tables import (
    EAGER,
    PROGRAMS,
    Transform,
    X,
    every,
)
from tsfunc import (
    checkpoint,
    cond,
    fori_loop,
    grad,
    pytrees,
    vmap,
)

# --- side effects


class State:
    """Everything that a function with side effects changes."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.table: dict[str, Any] = {"last": None}
        self.names: set[str] = {"old"}
        self.box = SimpleNamespace(value=None)
        self.clock: list[bool] = []
        self.count = 0

    def effects(self, x: Tensor) -> Tensor:
        started = time.perf_counter()
        self.log.append("first")
        print("first")
        y = x.sin()
        self.table["last"] = len(self.log)
        self.names.add("new")
        self.names.discard("old")
        self.box.value = tuple(self.log)
        self.count += 1
        del self.table["gone"]
        print("second", self.count)
        self.log.append("second")
        self.clock.append(time.perf_counter() > started)
        return y


@every(EAGER)
def test_effects_happen_once_and_in_order(
    transform: Transform, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, state = State(), State()
    plain.table["gone"] = state.table["gone"] = 1
    plain.effects(X)
    printed = capsys.readouterr().out
    transform(state.effects)(X)
    assert capsys.readouterr().out == printed
    assert vars(state) == vars(plain)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_effects_of_chunks_happen_once_for_each(chunk: int) -> None:
    state, x = [], torch.ones(5, 2)

    def f(x: Tensor) -> Tensor:
        state.append(x.shape)
        return x.sin()

    vmap(f, chunk_size=chunk)(x)
    assert state == [(2,)] * -(-5 // chunk)


def test_effects_of_split_examples_happen_for_each_group() -> None:
    ways: list[str] = []

    def f(x: Tensor) -> Tensor:
        if x > 0:
            ways.append("positive")
            return x * 2
        ways.append("other")
        return -x

    out = vmap(f, data_dependent="split")(torch.tensor([1.0, -2.0, 3.0, -4.0]))
    assert out.tolist() == [2, 2, 6, 4] and sorted(ways) == ["other", "positive"]


@pytest.mark.parametrize("times", [1, 2])
def test_effects_of_a_checkpoint_happen_again_in_the_derivative(times: int) -> None:
    log = []

    def f(x: Tensor) -> Tensor:
        log.append("before")
        return x.sin().cos()

    g = grad(lambda x: checkpoint(f)(x).sum())
    for _ in range(times):
        g(X)
    assert len(log) == 2 * times


@every(EAGER)
def test_loops_run_their_step_as_often_as_python(transform: Transform) -> None:
    log: list[Any] = []

    def step(i: int, x: Tensor) -> Tensor:
        log.append(i)
        return x * i

    def loop(x: Tensor) -> Any:
        return fori_loop(0, 3, step, x)

    transform(loop)(X)
    assert log == [0, 1, 2]


@pytest.mark.parametrize("kind", [bool, torch.tensor])
def test_the_branch_that_is_not_taken_runs_at_most_once_and_without_data(kind: Any) -> None:
    log, kept = [], torch.zeros(2)

    def yes(x: Tensor) -> Tensor:
        log.append("yes")
        kept.add_(1)
        return x.sin()

    def no(x: Tensor) -> Tensor:
        log.append("no")
        return -x

    for _ in range(3):
        assert cond(kind(False), yes, no, X).equal(-X)
    assert log.count("no") == 3 and log.count("yes") <= 1
    cond(kind(False), yes, no, X.double())
    assert log.count("no") == 4 and log.count("yes") <= 2
    assert kept.tolist() == [0, 0]


def test_a_branch_that_some_examples_take_runs_once_for_them() -> None:
    log = []

    def yes(x: Tensor) -> Tensor:
        log.append("yes")
        return x.sin()

    def no(x: Tensor) -> Tensor:
        log.append("no")
        return -x

    out = vmap(lambda x: cond(x.sum() > 5, yes, no, x))(X)
    assert torch.equal(out, torch.where(X.sum(1, keepdim=True) > 5, X.sin(), -X))
    assert sorted(log) == ["no", "yes"]


@every(PROGRAMS)
def test_effects_that_are_no_assignments_happen_when_a_program_is_made(
    transform: Transform, capsys: pytest.CaptureFixture[str]
) -> None:
    log, count = [], 0

    def f(x: Tensor) -> Tensor:
        nonlocal count
        print("traced")
        count += 1
        log.append(1)
        return x.sin()

    g = transform(f)
    for _ in range(3):
        g(X)
    assert capsys.readouterr().out == "traced\n" and log == [1] and count == 1


# --- exceptions


class Special(Exception):
    """An exception that only these tests raise."""


@every(EAGER, PROGRAMS)
def test_an_exception_is_the_one_that_was_raised(transform: Transform) -> None:
    error, fails = Special("it is what it is"), True

    def f(x: Tensor) -> Tensor:
        if fails:
            raise error
        return x.sin()

    g = transform(f)
    for _ in range(2):
        with pytest.raises(Special) as caught:
            g(X)
        assert caught.value is error
    fails = False
    # The exception does not affect the next call.
    for got, want in zip(
        pytrees.leaves_of(g(X)), pytrees.leaves_of(transform(torch.sin)(X)), strict=True
    ):
        assert torch.equal(got, want)
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def effects_before_an_exception(transform: Transform) -> dict[str, Any]:
    """Return what a function has assigned to captured objects before it raises."""
    table: dict[str, Any] = {}
    box, count = SimpleNamespace(), 0

    def f(x: Tensor) -> Tensor:
        nonlocal count
        table["reached"] = 1
        box.reached = True
        count = 2
        raise Special

    with pytest.raises(Special):
        transform(f)(X)
    return table | vars(box) | ({"count": count} if count else {})


@every(EAGER)
def test_effects_before_an_exception_stay(transform: Transform) -> None:
    assert effects_before_an_exception(transform) == {"reached": True, "count": 2}


@every(PROGRAMS)
def test_assignments_before_an_exception_are_undone_by_a_trace(transform: Transform) -> None:
    assert effects_before_an_exception(transform) == {}
