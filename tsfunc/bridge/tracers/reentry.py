"""Reactivates levels that have ended, for code that a backward pass runs again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tsfunc.bridge.tracers.interrupts import undoing
from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import State, active_levels, replacing_captured_levels, using

_reruns: dict[Level, set[object]] = {}  # the active reruns of each ended level
_lock = threading.Lock()


@contextmanager
def reenter(state: State) -> Iterator[None]:
    """Activate a state and its levels on this thread within the block."""
    rerun = object()
    with undoing(functools.partial(_end_rerun, rerun)):
        with _lock:
            levels = [
                root for root in map(_root, state.levels) if not root.alive or root in _reruns
            ]
            for level in levels:
                _reruns.setdefault(level, set()).add(rerun)
                level.alive = True
                active_levels[level] = threading.get_ident()
        yield from _inside(state)


def _inside(state: State) -> Iterator[None]:
    # Levels inside a subset captured the subset's level in place of the vmap's.
    active = state.levels
    inside = [level for i, level in enumerate(active) if level.outer.levels != active[:i]]
    with (
        replacing_captured_levels(inside, lambda levels: active[: len(levels)]),
        using(state),
        watching_random(),
    ):
        yield


def _end_rerun(rerun: object) -> None:
    with _lock:
        for level in [level for level, reruns in _reruns.items() if rerun in reruns]:
            _reruns[level].discard(rerun)
            if not _reruns[level]:
                del _reruns[level]
                level.alive = False
                active_levels.pop(level, None)


def any_level_ended(state: State) -> bool:
    """True if a transform of a state has ended."""
    return any(not _root(level).alive for level in state.levels)


def _root(level: Level) -> Level:
    return level.root if isinstance(level, TracerLevel) else level
