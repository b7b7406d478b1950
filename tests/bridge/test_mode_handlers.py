"""An interrupt in the handler of torch's own modes and tensors does not end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tsfunc
from tsfunc.bridge.tracers.interrupts import restoring_thread_state, while_torch_traces
from tsfunc.bridge.tracers.mode_handlers import MODES


class _Interrupt(BaseException):
    pass


def _enters_and_raises(mode: Any, *_: Any) -> Any:
    """The mode enters itself, and the interrupt comes before it exits."""
    mode.__enter__()
    raise _Interrupt


# A mode's handler calls each function with the mode as its first argument.
_STEPS = {
    FakeTensorMode: (FakeTensorMode, "dispatch"),
    FunctionalTensorMode: (FunctionalTensorMode, "_can_decompose"),
    proxy_tensor.ProxyTorchDispatchMode: (proxy_tensor, "proxy_call"),
}


def test_every_mode_is_tested() -> None:
    assert _STEPS.keys() == {cls for cls, _ in MODES}


@pytest.mark.parametrize("mode", _STEPS)
def test_an_interrupt_while_a_backend_compiles(
    mode: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @tsfunc.specialize(backend="aot_eager")
    def f(x: Tensor) -> Tensor:
        return x.sin() * x

    x = torch.randn(3, dtype=torch.float64)
    monkeypatch.setattr(*_STEPS[mode], _enters_and_raises)
    with pytest.raises(_Interrupt):
        f(x)
    monkeypatch.undo()
    assert _get_current_dispatch_mode_stack() == []
    torch.testing.assert_close(f(x), x.sin() * x)


def test_an_interrupt_where_a_backend_leaves_anomaly_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    @tsfunc.specialize(backend="aot_eager")
    def f(x: Tensor) -> Tensor:
        return x.sin() * x

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(torch.autograd.detect_anomaly, "__exit__", _interrupt)
    with pytest.raises(_Interrupt):
        f(x)
    monkeypatch.undo()
    assert not torch.is_anomaly_enabled()
    torch.testing.assert_close(f(x), x.sin() * x)


def _in_a_process_of_its_own(function: Callable[[], None]) -> str:
    """Return the end of a function's output in another process, which torch may end."""
    code = f"from tests.bridge import test_mode_handlers as t; t.{function.__name__}()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _interrupt(*_: Any) -> None:
    raise _Interrupt


def _signalled(call: Callable[[], object], at: int, device: bool) -> int:
    """Send a signal at a step of a call; return the number of steps.

    Args:
        device: True if the steps are the calls of handlers for the device of a tensor; False if
            they are all calls of functions and their ends.
    """
    steps = sent = 0
    raised: list[object] = []
    sys.unraisablehook = raised.append  # in a destructor

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal steps, sent
        if not device:
            steps += event in ("call", "c_return")
        elif event == "call" and frame.f_code.co_name == "guarded":
            steps += torch.ops.prim.device.default in frame.f_locals["call"]
        if steps == at and not sent:
            sent = 1
            os.kill(os.getpid(), signal.SIGUSR1)

    def wait() -> None:
        """Wait for a signal that is sent again, by a thread that may start late."""
        end = time.monotonic() + 10
        while len(raised) < sent and time.monotonic() < end:
            time.sleep(0.01)

    for run in (call, wait):
        try:
            sys.setprofile(profile if run is call else None)
            run()
        except _Interrupt as error:
            raised.append(error)
    assert len(raised) == sent, at
    return steps


def steps_of_recorded_operators() -> None:
    signal.signal(signal.SIGUSR1, _interrupt)
    x = torch.randn(3, dtype=torch.float64)

    @restoring_thread_state
    def call() -> None:
        with while_torch_traces():
            y = FakeTensorMode().from_tensor(x).requires_grad_()
            (y.sin().view(3, 1) * 2).sum()

    call()
    count = _signalled(call, -1, device=False)
    for at in range(1, count, 1 + count // 300):
        _signalled(call, at, device=False)
        assert signal.getsignal(signal.SIGUSR1) is _interrupt, at
    print(count)


def handlers_for_devices_while_a_backend_compiles() -> None:
    signal.signal(signal.SIGUSR1, _interrupt)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def compiled() -> Tensor:
        @tsfunc.specialize(backend="aot_eager")
        def f(x: Tensor) -> Tensor:
            return tsfunc.cond(x.sum() > 0, torch.sin, torch.cos, x)

        return f(x)

    want = compiled()
    count = _signalled(compiled, -1, device=True)
    for at in range(1, count, 1 + count // 10):
        _signalled(compiled, at, device=True)
        assert _get_current_dispatch_mode_stack() == [], at
    torch.testing.assert_close(compiled(), want)
    print(count)


@pytest.mark.parametrize(
    "function", [steps_of_recorded_operators, handlers_for_devices_while_a_backend_compiles]
)
def test_an_interrupt_while_c_reads_metadata(function: Callable[[], None]) -> None:
    """The interrupt is delayed, since torch ends a process whose handler raises there."""
    assert int(_in_a_process_of_its_own(function)) > 20
