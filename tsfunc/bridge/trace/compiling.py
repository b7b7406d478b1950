"""The flag by which ``torch.compiler.is_compiling()`` is True inside a trace.

Libraries call this function before they look at a tensor's data, or cache a value across calls.

NOTE [is_compiling on one thread]
torch keeps one flag for all threads, and torch.compile on one thread may save and restore the flag
while another thread traces. While any trace runs, the flag is therefore an object that is true on
the tracing threads and false on the others. If torch saves it and restores it later, it is false
on all threads. If torch already compiles or exports, the flag stays True.

Private names used here (torch 2.13 and 2.14): ``torch.compiler._is_compiling_flag`` is the result
of ``torch.compiler.is_compiling``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tsfunc.dispatch.keys import DispatchKey
from tsfunc.dispatch.state import tls


class _Here(threading.local):
    """The active blocks of :func:`as_if_compiling` on this thread."""

    blocks = 0


_here: Final = _Here()


class _TrueOnTracingThreads:
    """A flag that is true on tracing threads, and combines with other values like a bool."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return _here.blocks > 0 or any(level.key is DispatchKey.Trace for level in tls.state.levels)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __int__(self) -> int:
        return int(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


_FLAG: Final = _TrueOnTracingThreads()
_changing = threading.Lock()
_blocks = 0  # active blocks of all threads


@contextmanager
def is_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` True inside this thread's traces, in a block."""
    global _blocks
    with _changing:
        _blocks += 1
        if not torch.compiler._is_compiling_flag:
            torch.compiler._is_compiling_flag = _FLAG  # type: ignore[assignment]
    try:
        yield
    finally:
        with _changing:
            _blocks -= 1
            if not _blocks and torch.compiler._is_compiling_flag is _FLAG:  # type: ignore[comparison-overlap]
                torch.compiler._is_compiling_flag = False


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` True on this thread, in a block without a trace."""
    _here.blocks += 1
    try:
        with is_compiling():
            yield
    finally:
        _here.blocks -= 1
