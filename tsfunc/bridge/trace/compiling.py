"""A trace says that it is one: ``torch.compiler.is_compiling()`` is True inside of it.

Libraries ask this before they look at a tensor's data, or keep a value from one call to the next.

NOTE [is_compiling on one thread]
torch keeps one flag for all threads, and code that torch compiles on one thread may save and
restore it while another thread traces. So the flag is, while any trace runs, an object: it is true
on the threads that trace, and false on the others. If torch saves it and restores it later, it is
false everywhere. Where torch compiles or exports already, the flag is True and stays so.

Private names used here (torch 2.13 and 2.14): ``torch.compiler._is_compiling_flag`` is what
``torch.compiler.is_compiling`` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tsfunc.dispatch.keys import DispatchKey
from tsfunc.dispatch.state import tls


class _TrueOnTracingThreads:
    """A flag that is true on a thread that traces, and that combines with others as a bool does."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return any(level.key is DispatchKey.Trace for level in tls.state.levels)

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
_blocks = 0  # of all threads


@contextmanager
def is_compiling() -> Iterator[None]:
    """A block in which ``torch.compiler.is_compiling()`` is True inside of this thread's traces."""
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
