"""Runs a trace outside of the modes that are active around its call.

The modes (``TorchFunctionMode``, ``TorchDispatchMode``) see the run of the program. A mode that
saw the trace too would act twice, and the program would keep its effects for calls without the
mode.

Private names used here (torch 2.11 to 2.13): in ``_C`` ``_len_torch_function_stack``,
``_pop_torch_function_stack`` and ``_push_on_torch_function_stack``, and the same for dispatch
modes, with ``_get_current_dispatch_mode_stack``; dispatch modes of torch's own tools have a
``_mode_key``; ``DeviceContext`` is the mode of the default device, a setting that traces observe;
``_DisableTorchDispatch`` takes operators past all dispatch modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import (
    _DisableTorchDispatch,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@contextmanager
def outside_modes() -> Iterator[None]:
    """Deactivate the user's modes on this thread within a block."""
    functions = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    kept = [mode for mode in functions if isinstance(mode, DeviceContext)]
    for mode in reversed(kept):
        _push_on_torch_function_stack(mode)
    dispatchers: list[Any] = []
    while _ends_with_users(_get_current_dispatch_mode_stack()):
        dispatchers.append(_pop_torch_dispatch_stack(None))
    try:
        yield
    finally:
        for mode in reversed(dispatchers):
            _push_on_torch_dispatch_stack(mode)
        for _ in kept:
            _pop_torch_function_stack()
        for mode in reversed(functions):
            _push_on_torch_function_stack(mode)


@contextmanager
def outside_all_modes() -> Iterator[None]:
    """Deactivate all modes on this thread within a block, those of torch's own tools included.

    Operators in the block compute with data, even if the block runs while a trace works out a
    result on tensors without data.
    """
    with outside_modes(), _DisableTorchDispatch():
        yield


def _ends_with_users(stack: Any) -> bool:
    """True if the innermost dispatch mode is the user's, not one of torch's own tools."""
    return bool(stack) and getattr(stack[-1], "_mode_key", None) is None
