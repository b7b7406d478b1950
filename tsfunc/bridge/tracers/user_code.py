"""Tells a traced function's own code from the code that implements the operators it calls.

NOTE [questions of the user's code]
A program depends on the answers that the traced function gets about sizes, strides and other
properties. An operator's rule, a transform's kernel and torch's own checks ask for such properties
too, but only to compute a result. :class:`UserCode` is the function mode under which a trace runs
the function. torch takes the mode off its stack while the mode handles a call, and kernels run
without function modes, so the mode is active exactly while the function's own code runs. A
transform that the function calls runs under the mode too; what it asks for its own sake is inside
of :func:`implementation`.

Private names used here (torch 2.11 to 2.14): ``_C._is_torch_function_mode_enabled`` is False while
function modes are disabled; ``overrides._get_current_function_mode_stack`` lists the active modes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch._C import _is_torch_function_mode_enabled
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

F = TypeVar("F", bound=Callable[..., Any])


class UserCode(TorchFunctionMode):
    """The function mode that is active while the code of a traced function runs."""


class _Asker(threading.local):
    """Attribute ``implementation``: True inside of :func:`implementation`."""

    implementation = False


_asker = _Asker()


def in_user_code() -> bool:
    """True if the code of a traced function runs: NOTE [questions of the user's code]."""
    return (
        _is_torch_function_mode_enabled()
        and not _asker.implementation
        and any(isinstance(mode, UserCode) for mode in _get_current_function_mode_stack())
    )


@contextmanager
def implementation() -> Iterator[None]:
    """Context manager: the questions of the block are a transform's own."""
    before, _asker.implementation = _asker.implementation, True
    try:
        yield
    finally:
        _asker.implementation = before


def caller_of_handlers() -> FrameType:
    """Return the frame whose call of torch reached the function handlers that run now."""
    own = at = inspect.currentframe()
    while True:
        while at is not None and at.f_code.co_name != _HANDLER:
            at = at.f_back
        while at is not None and at.f_back is not None and at.f_code.co_name == _HANDLER:
            at = at.f_back
        if at is None or at.f_code not in _passed_on:
            break
    found = at or own
    assert found is not None, "Python has frames"
    return found


def passes_call_on(method: F) -> F:
    """Mark a method of a tracer that passes the call which it answers on to the tracer's value.

    ``caller_of_handlers`` does not stop there.
    """
    _passed_on.add(method.__code__)
    return method


_passed_on: set[CodeType] = set()


_HANDLER = "__torch_function__"  # the name that torch calls, of tracers' handlers and of modes'
