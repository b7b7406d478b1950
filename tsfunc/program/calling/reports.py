"""Reports of new programs: a line in the terminal while one is made, and the log.

``docs/programs.md`` lists the records and the names of the loggers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from tsfunc.program.program import Program

_SECONDS = 1.0  # a trace or compilation that takes less shows nothing

_retraces = logging.getLogger("tsfunc.retraces")
_guards = logging.getLogger("tsfunc.guards")
_code = logging.getLogger("tsfunc.code")


def log_program(
    program: Program, reason: str, seconds: float, backend: str, arguments: str
) -> None:
    """Log a new program: its function, its reason, and the time of its trace."""
    _retraces.info(
        "specialize(%s): a new program for (%s) took %.2f s with the backend %s. Reason: %s",
        program.name, arguments, seconds, backend, reason,
    )  # fmt: skip
    _guards.info("specialize(%s): the guards of the new program:\n%s", program.name, program.guards)
    if _code.isEnabledFor(logging.INFO):
        _code.info("specialize(%s): the code of the new program:\n%s", program.name, program)


@contextlib.contextmanager
def progress(name: str, reason: str) -> Iterator[None]:
    """Show on stderr that a program is being made, if it takes long and stderr is a terminal."""
    if not _in_a_terminal() or threading.current_thread() is not threading.main_thread():
        yield
        return
    line = _ProgressLine(f"specialize({name}): making a program ({reason})")
    timer = threading.Timer(_SECONDS, line.show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        line.hide()


class _ProgressLine:
    """A line with a spinner. ``show`` and ``hide`` run on different threads."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._hidden = False

    def show(self) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        with self._lock:
            if not self._hidden:
                self._stack.enter_context(console.status(self._text))

    def hide(self) -> None:
        with self._lock:
            self._hidden = True
            self._stack.close()


def _in_a_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
