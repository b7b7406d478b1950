"""The page of docs names each of its tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "semantics.md"


def _named() -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE.read_text())


def test_tests_that_the_page_names_exist() -> None:
    assert len(_named()) > 30
    for file, name in _named():
        text = (ROOT / file).read_text()
        for part in name.split("::"):
            assert re.search(rf"(?:def|class) {part}\b", text), (file, name)


def test_the_page_names_every_law() -> None:
    files = [file for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__)]
    laws = {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    named = {name for file, name in _named() if file.startswith("tests/semantics/")}
    assert len(laws) > 20 and laws == named


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().split()) < 1200
