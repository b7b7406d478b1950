"""Forward mode on several threads: torch has one dual level for all of them."""

from __future__ import annotations

import threading

import pytest
import torch

from tsfunc import grad, jvp
from tsfunc.bridge.grad import dual_level


def test_threads_take_turns() -> None:
    x = torch.randn(5)
    want = x.cos() - x * x.sin()
    found: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(20):
            found.append(grad(lambda x: jvp(torch.sin, (x,), (x,))[1].sum())(x))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for got in found:
        torch.testing.assert_close(got, want)


def test_a_thread_that_a_jvp_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread can't wait for its turn, so it differentiates the pullback instead."""
    monkeypatch.setattr(dual_level, "_DUAL_PATIENCE", 0.01)
    x = torch.randn(5)
    inner: list[torch.Tensor] = []

    def waiting(x: torch.Tensor) -> torch.Tensor:
        y = torch.randn(3)
        run = threading.Thread(target=lambda: inner.extend(jvp(torch.sin, (y,), (y,))))
        run.start()
        run.join()
        torch.testing.assert_close(inner, [y.sin(), y.cos() * y])
        return x.sin()

    torch.testing.assert_close(jvp(waiting, (x,), (x,)), (x.sin(), x.cos() * x))
