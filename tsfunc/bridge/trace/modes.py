"""A trace is made outside of the modes that are around its call: these see the program run.

A mode (``TorchFunctionMode``, ``TorchDispatchMode``) that saw the trace too would do its part
twice, and what it does in one block would be in the program for good.

Private names used here (torch 2.11 to 2.13): of ``_C`` ``_len_torch_function_stack``,
``_pop_torch_function_stack`` and ``_push_on_torch_function_stack``, and the same of dispatch modes,
with ``_get_current_dispatch_mode_stack``; a dispatch mode of torch's own tools has a ``_mode_key``;
``DeviceContext`` is the mode of the default device, a setting that traces look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import (
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
    """A block in which no mode of the user's is active on this thread."""
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


def _ends_with_users(stack: Any) -> bool:
    """Whether the innermost dispatch mode is none of torch's own tools."""
    return bool(stack) and getattr(stack[-1], "_mode_key", None) is None
