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
    """A name that nothing has yet: keys and operators are there for good, process by process."""
    return f"{name}_{next(_count)}"


class Value:
    """The least that can stand for a value of a level."""

    def __init__(self, level: Level) -> None:
        self.dispatch_level = level


class Plain:
    """A value with keys of its own, and of no level."""

    dispatch_keys = DispatchKeySet(DispatchKey.CPU)


def on_another_thread(call: Callable[[], R]) -> R:
    """Runs a function on a new thread; gives its result here, or raises its error here."""
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
    """``file:line`` of the line of a function's source that has a marker, as a pattern."""
    lines, start = inspect.getsourcelines(source)
    (offset,) = [i for i, line in enumerate(lines) if f"# {marker}" in line]
    return re.escape(f"{inspect.getsourcefile(source)}:{start + offset}")
