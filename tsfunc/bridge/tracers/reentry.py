"""Reactivates levels that have ended, for code that a backward pass runs again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import State, active_levels, capturing, using

_rerun_counts: Counter[int] = Counter()  # the number of active reruns of an ended level, by id
_lock = threading.Lock()


@contextmanager
def reenter(state: State) -> Iterator[None]:
    """Activate a state and its levels on this thread within the block."""
    with _lock:
        levels = [
            root for root in map(_root, state.levels) if not root.alive or _rerun_counts[id(root)]
        ]
        for level in levels:
            _rerun_counts[id(level)] += 1
            level.alive = True
            active_levels[level] = threading.get_ident()
    # Levels inside a subset captured the subset's level in place of the vmap's.
    here = state.levels
    inside = [level for i, level in enumerate(here) if level.outer.levels != here[:i]]
    try:
        with capturing(inside, lambda levels: here[: len(levels)]), using(state), watching_random():
            yield
    finally:
        with _lock:
            for level in levels:
                _rerun_counts[id(level)] -= 1
                if not _rerun_counts[id(level)]:
                    del _rerun_counts[id(level)]
                    level.alive = False
                    active_levels.pop(level, None)


def any_level_ended(state: State) -> bool:
    """True if a transform of a state has ended."""
    return any(not _root(level).alive for level in state.levels)


def _root(level: Level) -> Level:
    return level.root if isinstance(level, TracerLevel) else level
