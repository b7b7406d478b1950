"""Warnings for a torch that the package was not tested with, and claims about tested releases."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tsfunc.errors import UntestedTorchWarning
from tsfunc.releases import TESTED_TORCH, release, warn_if_untested

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = "import tsfunc, tsfunc.errors; import importlib; import tsfunc.types"


def imported_with(version: str, *options: str) -> subprocess.CompletedProcess[str]:
    code = f"import torch; torch.__version__ = {version!r}; {IMPORTED}"
    run = [sys.executable, *options, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("version", ["2.15.0", "2.14.2+cpu", "3.0.0a0+git1234", "2.14.10"])
def test_a_newer_release_gives_a_warning(version: str) -> None:
    with pytest.warns(UntestedTorchWarning, match=re.escape(f"got torch {version}")) as caught:
        warn_if_untested(version)
    assert len(caught) == 1
    assert TESTED_TORCH[-1] in str(caught[0].message)


@pytest.mark.parametrize("version", [*TESTED_TORCH, "2.14.1+cu130", "2.13.0+cpu", "2.13.1"])
def test_other_releases_give_none(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)


def test_the_package_warns_once_as_it_is_imported() -> None:
    done = imported_with("9.0.0")
    assert done.returncode == 0
    assert done.stderr.count("UntestedTorchWarning") == 1
    assert imported_with("9.0.0", "-W", "ignore:tsfunc was tested").stderr == ""
    assert imported_with(TESTED_TORCH[0], "-W", "error").stderr == ""


def test_release_numbers() -> None:
    assert release("2.14.1+cu130") == (2, 14, 1)
    assert release("2.9.0") < release("2.10.0")


def test_the_files_of_the_project_name_the_same_releases() -> None:
    constraint = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert constraint is not None and constraint[1] == TESTED_TORCH[0]
    newest = re.search(r"^NEWEST := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert newest is not None and newest[1] == TESTED_TORCH[-1]
    lowest = ".".join(TESTED_TORCH[0].split(".")[:2])
    assert f'"torch>={lowest}"' in (ROOT / "pyproject.toml").read_text()
    readme = (ROOT / "README.md").read_text()
    assert all(f"torch {version}" in readme for version in TESTED_TORCH)
