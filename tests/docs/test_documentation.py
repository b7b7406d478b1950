"""The code in the documentation runs: the README's snippets, and each docstring's example."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import tsfunc

ROOT = Path(__file__).parents[2]
MODULES = [m.name for m in pkgutil.walk_packages(tsfunc.__path__, "tsfunc.")]


@pytest.mark.parametrize(
    "page",
    [
        "README.md", "docs/operators.md", "docs/files.md", "docs/programs.md",
        "docs/descriptors.md", "docs/soundness.md", "docs/core.md", "docs/errors.md",
        "docs/mesh.md",
    ],
)  # fmt: skip
def test_snippets_run_in_order(page: str) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert snippets
    scope: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), scope)


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_links_of_the_docs_lead_somewhere(path: str) -> None:
    text = (ROOT / "docs" / path).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("page", ["types.md", "descriptors.md"])
def test_tests_that_these_pages_name_exist(page: str) -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / page).read_text())
    assert named
    for file, name in named:
        path = ROOT / (file if file.startswith("tests/") else f"tests/types/{file}")
        assert path.exists(), file
        assert not name or re.search(rf"(def|class) {name}\b", path.read_text()), (file, name)


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_the_architecture_runs_and_fits_on_a_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.split()) <= 1000
    (core,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(core, "docs/architecture.md", "exec"), {})


def test_the_core_has_200_lines_at_most() -> None:
    text = (ROOT / "docs" / "core.md").read_text()
    lines = "".join(re.findall(r"```python\n(.*?)```", text, re.S)).splitlines()
    assert len([line for line in lines if line.strip()]) <= 200


@pytest.mark.parametrize("page", ["architecture.md", "core.md", "internals.md"])
def test_files_that_the_architecture_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for name in re.findall(r"`((?:bridge|ops|program|transforms|types|dispatch)/[\w/]*)", text):
        assert list((ROOT / "tsfunc").glob(f"{name}*")), name
    notes = "\n".join(p.read_text() for p in (ROOT / "tsfunc").rglob("*.py"))
    for note in re.findall(r"NOTE \[[^\]]+\]", text):
        assert note in notes, note


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_tests_that_the_docs_name_exist(path: str) -> None:
    text = (ROOT / "docs" / path).read_text()
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert re.search(rf"(?:def|class) {name}\b", (ROOT / file).read_text()), (file, name)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testmod(
        module, extraglobs={"torch": __import__("torch")}, optionflags=options
    )
    assert failed == 0


@pytest.mark.parametrize("name", [n for n in tsfunc.__all__ if callable(getattr(tsfunc, n))])
def test_public_functions_say_what_they_do(name: str) -> None:
    doc = getattr(tsfunc, name).__doc__
    assert doc and len(doc) > 60


def test_the_types_page_runs_and_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "types.md").read_text()
    for snippet in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(snippet, "docs/types.md", "exec"), {"__name__": "types_page"})
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    for path, name in named:
        file = ROOT / (path if path.startswith("tests/") else f"tests/types/{path}")
        assert re.search(rf"(?:def|class) {name}\b", file.read_text()), (path, name)
