"""Functions that record the kernel that served each dispatched call, and the line that called it.

A recorder is part of a thread's state, as the levels are. A level captures the recorder, so that
calls on other threads (backward passes) reach it too. Recording costs nothing without a recorder:
call plans already require ``State.plain``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tsfunc.dispatch.recorder import KernelUse, Recorder, name_of_rule
from tsfunc.dispatch.state import Level, tls, using
from tsfunc.user_code import code_location_text


def note(how: str, rule: str = "", source: str = "") -> None:
    """Record how the running kernel serves its call, if there is a recorder."""
    recorder = tls.state.recorder
    if recorder is not None:
        recorder.note(how, rule, source)


def run_as(
    operator: str, level: Level, rule: Callable[..., Any], *args: Any, how: str = "rule"
) -> Any:
    """Call a rule that is not in the table, and record that it served an operator.

    A rule that returns NotImplemented is not recorded.

    Args:
        operator: the name of the operator or function that was called.
        rule: the rule, called with ``args``.
        how: the kind of the rule in the report.
    """
    recorder = tls.state.recorder
    if recorder is None:
        return rule(*args)
    location, backward = recorder.location()
    use = KernelUse(
        operator, location, backward, level.key.name, level.name, level.depth, how,
        name_of_rule(inspect.unwrap(rule)), code_location_text(rule),
    )  # fmt: skip
    return recorder.run(use, lambda: rule(*args))


@contextmanager
def record_calls(recorder: Recorder) -> Iterator[None]:
    """Context manager: record the calls that are dispatched in the block."""
    with using(tls.state.replace(recorder=recorder)):
        yield
