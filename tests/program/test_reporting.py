"""Logs of new programs, and the progress that a terminal shows."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tsfunc import MetaTensorType, specialize
from tsfunc.config import log_to_stderr
from tsfunc.program.calling import reports

ROOT = Path(__file__).resolve().parents[2]


def test_a_new_program_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    f = specialize(doubled)
    with caplog.at_level(logging.INFO, "tsfunc"):
        f(torch.ones(3))
        f(torch.ones(3))
        f(torch.ones(4))
    records = [r for r in caplog.records if r.name == "tsfunc.retraces"]
    assert len(records) == 2
    first, second = (record.getMessage() for record in records)
    assert first.startswith("specialize(doubled): a new program for (") and " s with the" in first
    assert "Reason: the first call" in first
    assert "Reason: x.shape[0]: 4, was 3" in second
    (guards, _) = (r.getMessage() for r in caplog.records if r.name == "tsfunc.guards")
    assert "x: f32[3] cpu" in guards
    (code, _) = (r.getMessage() for r in caplog.records if r.name == "tsfunc.code")
    assert "def doubled(args):" in code


def test_nothing_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    specialize(lambda x: x * 2, {"x": MetaTensorType([3])})(torch.ones(3))
    assert not [r for r in caplog.records if r.name.startswith("tsfunc")]


def test_the_environment_chooses_logs() -> None:
    code = "import torch, tsfunc; tsfunc.specialize(lambda x: x * 2)(torch.ones(3))"
    for names, expected in {"retraces": ["retraces"], "guards,code": ["guards", "code"]}.items():
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
            env={"TSFUNC_LOG": names, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        shown = [
            name for name in ("retraces", "guards", "code") if f"tsfunc.{name}:" in done.stderr
        ]
        assert shown == expected


def test_an_unknown_log_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected names of retraces, guards, code"):
        log_to_stderr("retraces,graphs")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_trace_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = Terminal(), threading.Event()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(reports, "_SECONDS", 0.0)
    show = reports._ProgressLine.show

    def told(line: reports._ProgressLine) -> None:
        show(line)
        shown.set()

    monkeypatch.setattr(reports._ProgressLine, "show", told)
    with reports.progress("f", "the first call"):
        assert shown.wait(60)
    assert "specialize(f): making a program (the first call)" in terminal.getvalue()


def test_nothing_is_shown_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(reports, "_SECONDS", 0.0)
    with reports.progress("f", "the first call"):
        time.sleep(0.01)
    assert stream.getvalue() == ""


def test_a_short_trace_starts_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    before = threading.active_count()
    with reports.progress("f", "the first call"):
        assert threading.active_count() == before + 1
    assert terminal.getvalue() == ""
