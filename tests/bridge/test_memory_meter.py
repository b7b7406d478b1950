"""Meter: the memory that a block allocates, measured on blocks of known sizes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd.profiler import profile

from tsfunc.bridge.tracers.memory_meter import Meter

CPU = torch.device("cpu")
KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_peak_and_held_memory() -> None:
    with Meter(CPU) as meter:
        kept = block(10)
        for _ in range(3):
            gone = block(100)
            del gone
    assert meter.peak == 110 * KIB
    assert meter.held == kept.nbytes


def test_memory_from_before_is_not_counted() -> None:
    before = block(50)
    with Meter(CPU) as meter:
        before.zero_()
        after = before[:10]
    assert after.shape == (10,)
    assert (meter.peak, meter.held) == (0, 0)


def test_temporaries_inside_of_an_operator_count() -> None:
    x = torch.randn(64, 64)
    with Meter(CPU) as meter:
        torch.nn.functional.layer_norm(x.double(), (64,))
    assert meter.peak >= 2 * 64 * 64 * 8
    assert meter.held == 0


def test_backward_passes_count() -> None:
    x = torch.randn(1000, requires_grad=True)
    with Meter(CPU) as meter:
        x.sin().sum().backward()
    assert x.grad is not None
    assert meter.held == x.grad.nbytes
    assert meter.peak >= 2 * x.nbytes


def test_meters_inside_of_one_another() -> None:
    with Meter(CPU) as outer:
        one = block(10)
        with Meter(CPU) as inner:
            two = block(20)
            gone = block(40)
            del gone
        three = block(5)
    assert (inner.peak, inner.held) == (60 * KIB, two.nbytes)
    assert (outer.peak, outer.held) == (70 * KIB, one.nbytes + two.nbytes + three.nbytes)


def test_it_ends_with_its_block_also_after_an_error() -> None:
    with pytest.raises(KeyError), Meter(CPU):
        raise KeyError("mine")
    with Meter(CPU) as meter:
        pass
    assert (meter.peak, meter.held) == (0, 0)
    with pytest.raises(KeyError), Meter(CPU), Meter(CPU):
        raise KeyError("mine")
    with profile(use_kineto=False):  # no thread is left running
        torch.ones(1)


def test_other_threads_have_meters_of_their_own() -> None:
    found = []

    def work() -> None:
        with Meter(CPU) as meter:
            block(30)
        found.append(meter.peak)

    with Meter(CPU) as meter:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        block(10)
    assert found == [30 * KIB]
    assert meter.peak == 10 * KIB


def test_beside_a_profiler_the_error_has_a_remedy() -> None:
    with profile(use_kineto=False), pytest.raises(RuntimeError, match="a profiler runs on this"):
        Meter(CPU).__enter__()


def test_an_accelerator_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the accelerator's own counter is reset at the start of the block."""
    state = {"now": 100, "peak": 900}
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "memory_allocated", lambda device: state["now"])
    monkeypatch.setattr(accelerator, "max_memory_allocated", lambda device: state["peak"])
    monkeypatch.setattr(
        accelerator, "reset_peak_memory_stats", lambda device: state.update(peak=state["now"])
    )
    with Meter(torch.device("cuda", 0)) as meter:
        state.update(now=130, peak=170)
    assert (meter.peak, meter.held) == (70, 30)
