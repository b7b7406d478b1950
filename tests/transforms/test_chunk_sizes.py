"""Chunk sizes from a memory budget, on functions of known memory use."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tsfunc.errors import MemoryBudgetWarning
from tsfunc.transforms import chunk_sizes
from tsfunc.transforms.chunk_sizes import GROWTH, MARGIN, MeasuredSize, MemoryModel, _bytes_text


class Pretended:
    """A stand-in for a meter: a chunk takes ``fixed + each * k`` and leaves ``held * k``."""

    def __init__(self, fixed: int, each: int, held: int) -> None:
        self.fixed, self.each, self.of_one = fixed, each, held
        self.examples = 0
        self.peak = self.held = 0

    def __call__(self, device: torch.device) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.peak = self.fixed + self.each * self.examples
        self.held = self.of_one * self.examples


def chunks_of(
    monkeypatch: pytest.MonkeyPatch, model: MemoryModel, memory: Pretended, budget: int, total: int
) -> list[int]:
    """Run a batch, and return the sizes of its chunks."""
    monkeypatch.setattr(chunk_sizes, "Meter", memory)
    sizes = MeasuredSize(model, budget, total, torch.device("cpu"), "f")
    found: list[int] = []
    for length in sizes.lengths(total):
        memory.examples = length
        with sizes.running(length):
            pass
        found.append(length)
    return found


@given(
    fixed=st.integers(0, 10_000),
    each=st.integers(1, 1000),
    held=st.integers(0, 1000),
    total=st.integers(2, 3000),
    room=st.floats(1, 500),
)
def test_the_budget_is_kept_and_used(
    fixed: int, each: int, held: int, total: int, room: float
) -> None:
    """The budget holds for every function of this kind if twice the use of one example fits.

    With less room the only known figure is the use of one example.
    """
    held = min(held, each)
    first = (fixed + each) * 2 + total * held
    budget = int((first + room * each) / MARGIN) + 1
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MemoryModel()
        memory = Pretended(fixed, each, held)
        found = chunks_of(patch, model, memory, budget, total)
        assert sum(found) == total
        assert max(found) * each + fixed + total * held <= budget
        best = min(total, int((MARGIN * budget - total * held - fixed) / each))
        # The first chunks grow, the rest have the best size.
        growing = 2 + best.bit_length()
        assert len(found) <= total / best + growing
        again = chunks_of(patch, model, memory, budget, total)
        if len(found) > 1 and max(found[:-1]) > 1:
            assert again[0] >= min(best, total) - 1
            assert max(again) * each + fixed + total * held <= budget


def test_chunks_grow_while_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chunks_of(monkeypatch, MemoryModel(), Pretended(0, 1, 0), 10**9, 5000)
    assert found == [1, GROWTH, GROWTH**2, GROWTH**3, GROWTH**4, 319]


def test_measurements_are_used_for_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = MemoryModel(), Pretended(100, 10, 0)
    chunks_of(monkeypatch, model, memory, 1000, 200)
    assert (model.fixed, model.per_example, model.held) == (100, 10, 0)
    assert chunks_of(monkeypatch, model, memory, 1000, 170) == [80, 80, 10]
    assert chunks_of(monkeypatch, model, memory, 500, 60) == [35, 25]


def test_a_chunk_that_takes_more_than_foreseen_makes_the_next_ones_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Growing(Pretended):
        def __exit__(self, *exc: object) -> None:
            super().__exit__()
            if self.examples > 1:
                self.peak *= 3

    found = chunks_of(monkeypatch, MemoryModel(), Growing(0, 10, 0), 1000, 100)
    assert found[:2] == [1, 8]
    assert max(found[2:]) <= 30


def test_a_budget_that_is_too_small_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"the memory budget of 1.5 KiB is too small: one example at a time takes 1.953 KiB"
    with pytest.warns(MemoryBudgetWarning, match=message) as seen:
        found = chunks_of(monkeypatch, MemoryModel(), Pretended(1000, 1000, 3), 1536, 4)
    assert found == [1, 1, 1, 1]
    assert len(seen) == 1
    assert "4 examples leave 12 B in use together" in str(seen[0].message)
    assert "memory_budget=" in str(seen[0].message)


def test_results_too_large_for_two_copies_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MemoryModel()
    model.observe(1, 10, 10)
    assert model.largest(200, 10) == 8
    model.copied = 11
    assert model.largest(200, 10) == 0


def test_a_model() -> None:
    model = MemoryModel()
    assert not model.is_measured
    model.observe(1, 100, 10)
    assert model.is_measured
    assert (model.fixed, model.per_example, model.held) == (0, 100, 10)
    model.observe(5, 180, 50)
    assert (model.fixed, model.per_example, model.held) == (80, 20, 10)
    assert model.peak(10) == 280
    assert model.largest(10_000, 3) == 3
    # Five examples use no more than one: an example's result is its least use.
    model.observe(10, 180, 100)
    assert model.per_example == 10
    # A chunk is never predicted to use less than its share of the whole.
    model.observe(20, 9000, 100)
    assert (model.fixed, model.per_example) == (0, 450)


def test_an_example_that_takes_nothing() -> None:
    model = MemoryModel()
    model.observe(1, 0, -5)
    assert model.largest(1, 1000) == 1000


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**20, "3 MiB"), (5 * 2**40, "5120 GiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert _bytes_text(size) == text
