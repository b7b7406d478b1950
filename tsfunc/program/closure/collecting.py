"""Garbage collection while a function is traced.

NOTE [collections while tracing]
A trace makes hundreds of objects per operator and keeps most of them. Python's collector reacts by
scanning all objects again and again, those of torch included, which took two fifths of the time of
a trace of 10,000 operators. During a trace the collector therefore runs less often, and mostly on
new objects only.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (50_000, 50, 1_000)  # number of new objects, then of younger collections per older one

_lock = threading.Lock()
_traces = 0
_before = gc.get_threshold()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Context manager that makes collections rare: NOTE [collections while tracing].

    Any number of threads may be inside it at a time.
    """
    global _traces, _before
    with _lock:
        _traces += 1
        if _traces == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < _SELDOM[0]:  # 0: the collector is turned off
                gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces and gc.get_threshold() == _SELDOM:
                gc.set_threshold(*_before)
