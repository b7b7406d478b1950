"""Objects that a checkpoint's function makes, reused when a backward pass runs the function again.

NOTE [replayed subsets]
The graph that a checkpoint recorded belongs to the levels of its first run, and tensors that a
rerun computes for the graph must belong to the same levels. The active levels of the first run are
activated again (NOTE [recomputation] in ``checkpoints``). Active subsets, which the
function makes itself, are reused in the order in which they were made. A checkpoint inside a
checkpoint is made again in each run of the outer one: its objects are recorded for the inner
checkpoint, and come from the record of the outer one.

A gradient inside of the function may run it again before the first run ends. The objects of that
rerun are those of the first run, and are not recorded a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.dispatch.state import overriding

T = TypeVar("T")


class _Runs(threading.local):
    """The records of the active runs on a thread, outermost first: to fill, or to read."""

    recorded: Sequence[list[Any]] = ()
    replays: Sequence[tuple[list[Any], Iterator[Any]]] = ()


_runs = resets(_Runs())


def recording_objects(record: list[Any]) -> AbstractContextManager[None]:
    """Context manager: record the objects that the block makes."""
    return overriding(_runs, recorded=(*_runs.recorded, record))


def replaying(record: list[Any]) -> AbstractContextManager[None]:
    """Context manager: reuse the recorded objects in the block."""
    return overriding(_runs, replays=(*_runs.replays, (record, iter(record))))


def replayed(make: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """Return the object from this point of the first run if it fits, else a new one."""
    made = None
    for _, objects in _runs.replays:
        made = next(objects, None)
    if made is None or not fits(made):
        made = make()
    for record in _runs.recorded:
        if not any(record is replay for replay, _ in _runs.replays):
            record.append(made)
    return made
