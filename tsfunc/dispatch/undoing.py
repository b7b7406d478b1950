"""Changes that transforms make for the time of a block, undone even if an interrupt cuts it off.

NOTE [changes undone after an interrupt]
A signal handler may raise where a block begins or ends: after a change was made and before the
block protects it, or in the middle of the code that undoes it. Two kinds of changes would outlive
the call then. Both are undone when the thread's outermost transform is left with an exception:

- attributes of a ``threading.local``: those of the locals in ``resets`` are at their defaults
  whenever no transform runs, and are reset to them;
- changes elsewhere (a flag of torch's, the threshold of the garbage collector, a method of a user's
  class): the block is an ``undoing``, which notes the function that undoes the change before it is
  made, and drops the note after the function has run to its end. The functions that are still noted
  run again, the last one first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch.compiler import is_dynamo_compiling


class _Noted(threading.local):
    """The blocks of a thread that are not left yet, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[undoing] = []


_noted: Final = _Noted()


class undoing:
    """Context manager: undo a change at the end of the block, whatever ends it.

    Args:
        undo: called at the end of the block, perhaps more than once, and perhaps before the change
            was made. It sets what was there before the block, rather than counting.
    """

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            return
        _noted.blocks.append(self)

    def __exit__(self, *error: object) -> None:
        if is_dynamo_compiling():
            self._undo()
            return
        blocks = _noted.blocks
        # A block that an interrupt cut off may end later, when its frame is freed.
        if self in blocks:
            undo_to(blocks.index(self))


def open_blocks() -> int:
    """Return the number of blocks of this thread that are not left yet."""
    return len(_noted.blocks)


def undo_to(count: int) -> None:
    """Undo the changes of all blocks of this thread but the first ``count``."""
    blocks = _noted.blocks
    while len(blocks) > count:
        blocks[-1]._undo()
        blocks.pop()


_L = TypeVar("_L", bound=threading.local)
_locals: list[Any] = []


def resets(local: _L) -> _L:
    """Register a local of threads that is at its defaults whenever no transform runs."""
    _locals.append(local)
    return local


def reset_locals() -> None:
    """Reset the registered locals of this thread to their defaults."""
    for local in _locals:
        vars(local).clear()
        local.__init__()


_F = TypeVar("_F", bound=Callable[[], object])
_functions: list[Callable[[], object]] = []


def after_failure(function: _F) -> _F:
    """Register a function that is called after an outermost transform has failed."""
    _functions.append(function)
    return function


def run_after_failure() -> None:
    """Call the registered functions."""
    for function in _functions:
        function()
