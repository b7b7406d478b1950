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

In a trace the random numbers of a rerun are objects of this kind, too: a program can't set the
state of a generator, as ``torch.utils.checkpoint`` does for a rerun (``bridge/trace/draws.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.dispatch.state import overriding

T = TypeVar("T")


class RunRecord(list[Any]):
    """The objects of a run.

    Attributes:
        draws_at: the trace whose random numbers are among the objects; None without any.
    """

    def __init__(self, draws_at: Any = None) -> None:
        self.draws_at = draws_at


class _Runs(threading.local):
    """The records of the active runs on a thread, outermost first: to fill, or to read."""

    recorded: Sequence[RunRecord] = ()
    replays: Sequence[tuple[RunRecord, Iterator[Any]]] = ()


_runs = resets(_Runs())


def recording_objects(record: RunRecord) -> AbstractContextManager[None]:
    """Context manager: record the objects that the block makes."""
    return overriding(_runs, recorded=(*_runs.recorded, record))


def reuse_recorded(record: RunRecord) -> AbstractContextManager[None]:
    """Context manager: reuse the recorded objects in the block."""
    return overriding(_runs, replays=(*_runs.replays, (record, iter(record))))


def replay_object(make: Callable[[], T], fits: Callable[[T], bool], draws_at: Any = None) -> T:
    """Return the object from this point of the first run if it fits, else a new one.

    Args:
        draws_at: the trace, for an object that has random numbers.
    """
    generator = None
    for record, objects in _runs.replays:
        if draws_at is None or record.draws_at is draws_at:
            generator = next(objects, None)
    if generator is None or not fits(generator):
        generator = make()
    replays = [record for record, _ in _runs.replays]
    for record in _runs.recorded:
        of_kind = draws_at is None or record.draws_at is draws_at
        if of_kind and not any(record is replay for replay in replays):
            record.append(generator)
    return generator


def keeps_draws(trace: Any) -> bool:
    """True if the random numbers of a trace are recorded for a rerun, or those of a first run."""
    records = (*_runs.recorded, *[record for record, _ in _runs.replays])
    return any(record.draws_at is trace for record in records)
