"""Levels that have ended, active again for a block: for what a backward pass runs once more."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tsfunc.bridge.tracers.factories import watching_random
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import State, active_levels, capturing, using

_running: Counter[int] = Counter()  # by its id, how often a level that has ended runs again
_lock = threading.Lock()


@contextmanager
def entered_again(state: State) -> Iterator[None]:
    """The levels of a state are active, and it is this thread's, within the block."""
    with _lock:
        levels = [root for root in map(_root, state.levels) if not root.alive or _running[id(root)]]
        for level in levels:
            _running[id(level)] += 1
            level.alive = True
            active_levels[level] = threading.get_ident()
    # Levels inside of a subset captured its level while it replaced the vmap's.
    here = state.levels
    inside = [level for i, level in enumerate(here) if level.outer.levels != here[:i]]
    try:
        with capturing(inside, lambda levels: here[: len(levels)]), using(state), watching_random():
            yield
    finally:
        with _lock:
            for level in levels:
                _running[id(level)] -= 1
                if not _running[id(level)]:
                    del _running[id(level)]
                    level.alive = False
                    active_levels.pop(level, None)


def any_ended(state: State) -> bool:
    """Whether a transform of a state is over."""
    return any(not _root(level).alive for level in state.levels)


def _root(level: Level) -> Level:
    return level.root if isinstance(level, TracerLevel) else level
