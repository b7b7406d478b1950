"""The command ``tsfunc doctor``."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from tsfunc import doctor, releases
from tsfunc.bridge.private_names import PRIVATE_NAMES, PrivateNames, Risk
from tsfunc.cli import app


def _differs() -> None:
    raise RuntimeError("expected 1, got 2")


def test_it_prints_versions_and_passes() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for label in ("torch", "Python", "optree", "backends", "C++ compiler", "devices"):
        assert any(line.startswith(label) for line in done.output.splitlines()), label
    assert torch.__version__ in done.output
    assert "checked, all as expected" in done.output


def test_a_failed_check_is_printed_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = PrivateNames("A purpose", ("torch._C",), "", "", Risk.LOW, "", _differs)
    monkeypatch.setattr(doctor, "PRIVATE_NAMES", [PRIVATE_NAMES[0], bad])
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "A purpose: RuntimeError: expected 1, got 2" in done.output


def test_an_untested_release_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PRIVATE_NAMES", [])
    monkeypatch.setattr(releases, "TESTED_TORCH", ("2.12.0",))
    assert dict(doctor.examine().facts)["torch"].endswith("(not tested; tested are 2.12.0)")
