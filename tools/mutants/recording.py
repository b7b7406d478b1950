"""The record of a test file: the lines of the mutated files that each of its tests runs.

Each test file is recorded in a new process: a function with a cache would otherwise run its lines
in the first file alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.mutants.forks import forked

OPTIONS = (
    "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no", "-x",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
_AT_MOST = 1200  # CPU seconds of a file


@dataclass(frozen=True)
class CoveringTest:
    """A test that passes: its file, its id, its CPU seconds and the lines that it runs."""

    file: str
    id: str
    seconds: float
    lines: dict[str, frozenset[int]]


class Recorder:
    """A plugin of pytest that tells coverage which test runs, and how long it takes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self._began = 0.0
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._measured.switch_context(item.nodeid)
        began = time.process_time()
        result = yield
        self.seconds[item.nodeid] = time.process_time() - began
        self._measured.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # skipped tests kill nothing
            self.failed.add(report.nodeid)


def recorded(
    file: str, mutated: Sequence[str], root: Path, folder: Path, marked: str, stale: bool
) -> list[CoveringTest]:
    """Return the tests of a file that pass, from the record in ``folder`` or from a new run."""
    path = folder / f"{file.removesuffix('.py').replace('/', '.')}.json"
    texts = [root / file] if stale else [root / file, *(root / name for name in mutated)]
    digest = hashlib.sha256(b"".join(text.read_bytes() for text in texts)).hexdigest()
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("stale" if stale else "digest") != digest or known.get("marked") != marked:
        ended = forked(lambda: _record(file, mutated, root, marked), _AT_MOST)
        known = {"tests": ended.result or {}, "why": ended.why, "marked": marked}
        known["stale"] = hashlib.sha256((root / file).read_bytes()).hexdigest()
        every = b"".join((root / name).read_bytes() for name in (file, *mutated))
        known["digest"] = hashlib.sha256(every).hexdigest()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known))
    return [
        CoveringTest(
            file, name, test["seconds"], {k: frozenset(v) for k, v in test["lines"].items()}
        )
        for name, test in known["tests"].items()
    ]


def _record(file: str, mutated: Sequence[str], root: Path, marked: str) -> dict[str, Any]:
    os.chdir(root)
    names = {str(root / name): name for name in mutated}
    measured = coverage.Coverage(data_file=None, include=list(names), config_file=False)
    recorder = Recorder(measured)
    options = [option for option in OPTIONS if option != "-x"]
    measured.start()
    try:
        pytest.main([*options, "-m", marked, file], plugins=[recorder])
    finally:
        measured.stop()
    data = measured.get_data()
    tests: dict[str, Any] = {
        name: {"seconds": seconds, "lines": {}}
        for name, seconds in recorder.seconds.items()
        if name not in recorder.failed
    }
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                if context in tests:
                    tests[context]["lines"].setdefault(names[path], []).append(line)
    return tests
