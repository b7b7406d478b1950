"""Objects that a checkpoint's function makes, reused when a backward pass runs the function again.

NOTE [subsets of another run]
The graph that a checkpoint recorded belongs to the levels of its first run, and tensors that a
rerun computes for the graph must belong to the same levels. The active levels of the first run are
activated again (NOTE [run again in a backward pass] in ``checkpoints``). Active subsets, which the
function makes itself, are reused in the order in which they were made. A checkpoint inside a
checkpoint is made again in each run of the outer one: its objects are noted for the inner
checkpoint, and come from the notes of the outer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _Notes(threading.local):
    """The notes of the active runs on a thread, outermost first: to fill, or to read."""

    def __init__(self) -> None:
        self.noted: list[list[Any]] = []
        self.found: list[Iterator[Any]] = []


_notes = _Notes()


@contextmanager
def first_run(record: list[Any]) -> Iterator[None]:
    """Note the objects that the block makes."""
    _notes.noted.append(record)
    try:
        yield
    finally:
        _notes.noted.pop()


def is_noted() -> bool:
    """True if the running code may be run again and reuses noted objects."""
    return bool(_notes.noted)


@contextmanager
def another_run(record: list[Any]) -> Iterator[None]:
    """Reuse the noted objects in the block."""
    _notes.found.append(iter(record))
    try:
        yield
    finally:
        _notes.found.pop()


def same_again(make: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """Return the object from this point of the first run if it fits, else a new one."""
    found = None
    for known in _notes.found:
        found = next(known, None)
    if found is None or not fits(found):
        found = make()
    for record in _notes.noted:
        record.append(found)
    return found
