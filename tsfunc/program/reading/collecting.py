"""Garbage collection while a function is traced.

NOTE [collections while tracing]
A trace makes hundreds of objects an operator, and keeps most of them. Python's collector takes that
for a reason to look through all objects again and again, torch's own among them, which was two
fifths of the time of 10,000 operators. So it looks at new objects alone while a trace goes on, and
less often.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (50_000, 50, 1_000)  # new objects, then how often younger generations come before older

_lock = threading.Lock()
_traces = 0
_before = gc.get_threshold()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Context manager: NOTE [collections while tracing]. Any number of threads may be in one."""
    global _traces, _before
    with _lock:
        _traces += 1
        if _traces == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < _SELDOM[0]:  # 0: it was turned off
                gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces and gc.get_threshold() == _SELDOM:
                gc.set_threshold(*_before)
