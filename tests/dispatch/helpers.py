"""Helpers of the dispatcher's tests: unused names, and values of a level."""

from __future__ import annotations

import inspect
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tsfunc.dispatch import DispatchKey, DispatchKeySet, Level

R = TypeVar("R")
_count = itertools.count()


def unique(name: str) -> str:
    """Return an unused name: keys and operators can't be removed from a process."""
    return f"{name}_{next(_count)}"


class Value:
    """A minimal value of a level."""

    def __init__(self, level: Level) -> None:
        self.dispatch_level = level


class Plain:
    """A value with keys and without a level."""

    dispatch_keys = DispatchKeySet(DispatchKey.CPU)


def on_another_thread(call: Callable[[], R]) -> R:
    """Run a function on a new thread; return its result, or raise its error."""
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def line_of(marker: str, source: Any) -> str:
    """Return a pattern for ``file:line`` of the line with a marker in a function's source."""
    lines, start = inspect.getsourcelines(source)
    (offset,) = [i for i, line in enumerate(lines) if f"# {marker}" in line]
    return re.escape(f"{inspect.getsourcefile(source)}:{start + offset}")
