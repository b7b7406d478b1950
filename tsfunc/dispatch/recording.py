"""Recording what runs: which kernel served each call that was dispatched, and from where.

A recorder is part of a thread's state, as the levels are: what is entered under it captures it,
so that calls on other threads (backward passes) come to it too. Where there is none, nothing is
paid for it: the state says whether it is plain, which the shortest ways ask anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tsfunc.dispatch.recorder import Recorder, Use, name_of_rule
from tsfunc.dispatch.state import Level, tls, using


def note(how: str, rule: str = "", source: str = "") -> None:
    """Tells the recorder, if there is one, what the kernel that runs does with its call."""
    recorder = tls.state.recorder
    if recorder is not None:
        recorder.note(how, rule, source)


def run_as(operator: str, level: Level, rule: Callable[..., Any], *args: Any) -> Any:
    """Calls a rule that is in no table; a recorder is told that it served an operator."""
    recorder = tls.state.recorder
    if recorder is None:
        return rule(*args)
    code = getattr(rule, "__code__", None)
    source = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    place, backward = recorder.place()
    use = Use(
        operator, place, backward, level.key.name, level.name, level.depth, "rule",
        name_of_rule(rule), source,
    )  # fmt: skip
    return recorder.run(use, lambda: rule(*args))


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Context manager: what is dispatched in the block is recorded."""
    old = tls.state
    with using(old.changed(old.include, old.mask, old.excluded, recorder)):
        yield
