"""Forks of this process, which has imported torch but not tsfunc.

A fork imports tsfunc, with one file changed if requested, and runs tests. Its limits are CPU
seconds, so that a busy machine does not fail a test; a wait without work ends later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_MEMORY = 8 << 30  # bytes that a fork may use beyond this process
_IDLE = 10  # seconds of wall time for each CPU second of the limit


def preload() -> None:
    """Import the modules that tests need and mutants leave unchanged."""
    import hypothesis
    import optree
    import pytest
    import sympy
    import torch.testing._internal.common_methods_invocations

    torch.set_num_threads(1)
    assert hypothesis and optree and pytest and sympy
    assert "tsfunc" not in sys.modules, "a fork has to import tsfunc itself"


class ForkError(Exception):
    """The function of a fork raised, which does not judge a mutant."""


@dataclass(frozen=True)
class Ended:
    """The end of a fork: its result, or None with the signal or limit that ended it."""

    result: Any
    why: str
    seconds: float


def forked(function: Callable[[], Any], seconds: float) -> Ended:
    """Call a function in a fork and return its result, which must be picklable.

    Raises:
        ForkError: the function raised.
    """
    with tempfile.TemporaryFile() as results, tempfile.TemporaryFile() as printed:
        pid = os.fork()
        if pid == 0:
            _in_fork(function, seconds, results.fileno(), printed.fileno())
        ended, why = _waited_for(pid, seconds)
        results.seek(0)
        sent = results.read()
        if why or not sent:
            return Ended(None, why or "exit", ended)
        succeeded, result = pickle.loads(sent)
        if not succeeded:
            raise ForkError(result)
        return Ended(result, "", ended)


def _in_fork(function: Callable[[], Any], seconds: float, results: int, printed: int) -> None:
    try:
        try:
            os.setsid()
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            # Soft limits, because the fork sets limits for its own forks.
            limit(resource.RLIMIT_CPU, int(seconds) + 1)
            limit(resource.RLIMIT_AS, _memory() + _MEMORY)
            limit(resource.RLIMIT_CORE, 0)
            sent = pickle.dumps((True, function()))
        except BaseException:
            sent = pickle.dumps((False, traceback.format_exc()))
        with open(results, "wb", closefd=False) as file:
            file.write(sent)
    finally:
        os._exit(0)


def limit(what: int, value: int) -> None:
    """Set a soft limit of this process."""
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def _waited_for(pid: int, seconds: float) -> tuple[float, str]:
    end = time.monotonic() + seconds * _IDLE
    pause = 0.001
    while True:
        known, status, usage = os.wait4(pid, os.WNOHANG)
        if known:
            break
        if time.monotonic() > end:
            _end_group(pid)
            os.kill(pid, signal.SIGKILL)  # not reaped so far, so the id belongs to no other process
            _, _, usage = os.wait4(pid, 0)
            return usage.ru_utime + usage.ru_stime, "timeout"
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    _end_group(pid)
    used = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return used, "timeout" if number == signal.SIGXCPU else signal.Signals(number).name
    return used, ""


def _end_group(pid: int) -> None:
    """End the processes that a fork has started, and the fork, if it has its own group by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _memory() -> int:
    """Return the size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class _ChangedModule(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class ChangedFile:
    """A finder that replaces the source of one module; it goes first in ``sys.meta_path``."""

    def __init__(self, root: Path, file: str, text: str) -> None:
        self._path = str(root / file)
        self.module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._text = text

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        loader = _ChangedModule(name, self._path, self._text)
        package = [str(Path(self._path).parent)] if self._path.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, self._path, loader=loader, submodule_search_locations=package
        )
