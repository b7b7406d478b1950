"""An interrupt in the handler of one of torch's own modes does not end the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tsfunc
from tsfunc.bridge.tracers.mode_handlers import MODES


class _Interrupt(BaseException):
    pass


def _enters_and_raises(mode: Any, *_: Any) -> Any:
    """The mode enters itself, and the interrupt comes before it leaves itself."""
    mode.__enter__()
    raise _Interrupt


# Each is called by the handler of a mode, with the mode as its first argument.
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
