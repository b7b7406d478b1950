"""The code in the documentation runs: snippets of pages, and each docstring's example."""

from __future__ import annotations

import ast
import doctest
import importlib
import linecache
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import tsfunc
from tests.test_imports import PACKAGES

ROOT = Path(__file__).parents[2]
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
]
MODULES = [m.name for m in pkgutil.walk_packages(tsfunc.__path__, "tsfunc.")]


def snippets_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets_of(page)])
def test_snippets_run_in_order(page: str) -> None:
    """A page's snippets share one namespace, that of a module named after the page."""
    module = types.ModuleType(page.removesuffix(".md").replace("/", "_"))
    sys.modules[module.__name__] = module
    try:
        for number, snippet in enumerate(snippets_of(page)):
            name = f"<{page}, snippet {number}>"
            linecache.cache[name] = (len(snippet), None, snippet.splitlines(True), name)
            exec(compile(snippet, name, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    documented = set(re.findall(r"auto\w+:: tsfunc\.(\w+)", text))
    modules = {n for n in tsfunc.__all__ if isinstance(getattr(tsfunc, n), types.ModuleType)}
    missing = (set(tsfunc.__all__) | {"map"}) - modules - documented
    assert not missing, "add the names to a page of docs/reference, as its neighbours are"
    for name in modules:
        assert f"## tsfunc.{name}\n" in text, "add the module to docs/reference/modules.md"


@pytest.mark.parametrize("page", ["types.md", "descriptors.md"])
def test_tests_that_these_pages_name_exist(page: str) -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / page).read_text())
    assert named
    for file, name in named:
        path = ROOT / (file if file.startswith("tests/") else f"tests/types/{file}")
        assert path.exists(), file
        assert not name or re.search(rf"(def|class) {name}\b", path.read_text()), (file, name)


def test_internals_lists_the_files_that_serve_all_packages() -> None:
    text = (ROOT / "docs" / "internals.md").read_text().partition("| file | contents |")[2]
    listed = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", text.partition("\n\n")[0], re.M)
    assert tuple(listed) == PACKAGES[: PACKAGES.index("types")]


def test_the_architecture_lists_the_packages_in_the_order_of_their_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+)/` \|", text, re.M)
    assert listed == [
        each for each in PACKAGES[PACKAGES.index("types") :] if (ROOT / "tsfunc" / each).is_dir()
    ]


@pytest.mark.parametrize("package", ["types", "bridge/sizes", "bridge/tracers"])
def test_the_docstring_of_a_package_lists_its_modules(package: str) -> None:
    folder = ROOT / "tsfunc" / package
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    rows = re.findall(r"^    (\w+) +\S.*|^    - ((?:``\w+``(?:, )?)+):", doc, re.M)
    assert {name for row in rows for name in re.findall(r"\w+", " ".join(row))} == modules


def test_the_architecture_fits_on_a_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.split()) <= 1000


def test_the_core_has_200_lines_at_most() -> None:
    lines = "".join(snippets_of("docs/core.md")).splitlines()
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
def test_public_functions_have_docstrings(name: str) -> None:
    doc = getattr(tsfunc, name).__doc__
    assert doc and len(doc) > 60


def test_the_types_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "types.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    for path, name in named:
        file = ROOT / (path if path.startswith("tests/") else f"tests/types/{path}")
        assert re.search(rf"(?:def|class) {name}\b", file.read_text()), (path, name)
