"""The innermost tracer level of this thread, and that of some values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from tsfunc.bridge.tracers.tracer import TracerLevel, innermost_level
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import tls, using

L = TypeVar("L", bound=Level)


def at_level_of(values: Sequence[Any]) -> AbstractContextManager[None]:
    """Context manager: activate the values' innermost level, and no level inside it.

    This is for calls by C++ at that level on any thread, such as the formula of a node's tangent.
    """
    level = innermost_level(values)
    levels = tls.state.levels
    if level is not None:
        return nullcontext() if levels[-1:] == (level,) else using(level.inner)
    return using(levels[0].outer) if levels else nullcontext()


def current_level(kind: type[L]) -> L | None:
    """Return the innermost active level of a class on this thread, or None."""
    return _innermost(kind, tls.state.levels)


def current_tracer_level() -> TracerLevel | None:
    """Return the innermost active tracer level of this thread, or None."""
    return current_level(TracerLevel)


def tracer_level_outside(level: TracerLevel) -> TracerLevel | None:
    """Return the innermost tracer level that was active when a level was entered, or None."""
    return _innermost(TracerLevel, level.outer.levels)


def _innermost(kind: type[L], levels: Sequence[Level]) -> L | None:
    for level in reversed(levels):
        if isinstance(level, kind):
            return level
    return None
