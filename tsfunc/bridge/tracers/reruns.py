"""What a checkpoint's function makes, and finds again when a backward pass runs it once more.

NOTE [subsets of another run]
The graph that a checkpoint has recorded is of the levels of its first run, and the tensors that
another run computes for it must be of these too. The levels that were active are active again (NOTE
[run again in a backward pass] in ``checkpoints``); active subsets, which the function makes itself,
are handed out again in the order in which they were made. A checkpoint in a checkpoint is a new one
in each run of the outer one: what it makes is noted for it, and comes from the outer one's notes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _Notes(threading.local):
    """Of the runs that are under way on a thread, outermost first: what they note, or find."""

    def __init__(self) -> None:
        self.noted: list[list[Any]] = []
        self.found: list[Iterator[Any]] = []


_notes = _Notes()


@contextmanager
def first_run(record: list[Any]) -> Iterator[None]:
    """What is made in the block is noted."""
    _notes.noted.append(record)
    try:
        yield
    finally:
        _notes.noted.pop()


def is_noted() -> bool:
    """Whether what runs may be run again, and finds what it makes."""
    return bool(_notes.noted)


@contextmanager
def another_run(record: list[Any]) -> Iterator[None]:
    """What is made in the block is what was noted."""
    _notes.found.append(iter(record))
    try:
        yield
    finally:
        _notes.found.pop()


def same_again(make: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """What was made in this place of the first run, if it fits; else something new."""
    found = None
    for known in _notes.found:
        found = next(known, None)
    if found is None or not fits(found):
        found = make()
    for record in _notes.noted:
        record.append(found)
    return found
