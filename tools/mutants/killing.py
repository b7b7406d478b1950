"""Run the tests that cover a mutant, until one fails."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import pytest

from tools.mutants.drawing import Mutant
from tools.mutants.forks import ChangedFile, forked
from tools.mutants.recording import OPTIONS, CoveringTest

START = 2.0  # CPU seconds of a new import and a collection
SLACK = 20.0  # CPU seconds that imports may use


@dataclass(frozen=True)
class Verdict:
    """The outcome of a mutant: the test that killed it, if any, the tests that ran, and their cost.

    ``fresh``: the package was imported with the mutant.
    """

    killed: bool
    by: str
    ran: int
    covering: int
    seconds: float
    fresh: bool


class Chosen:
    """A pytest plugin that runs some tests of a file, in order, and keeps the first failure."""

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: place for place, name in enumerate(names)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def judged(mutant: Mutant, tests: Sequence[CoveringTest], root: Path, budget: float) -> Verdict:
    """Run the covering tests of a mutant: its own file's first, then the quickest.

    Args:
        budget: the CPU seconds of tests that may run, by their record.
    """
    covering = covering_tests(mutant, tests, root)
    chosen = chosen_tests(budget, covering, mutant, START)
    limit = SLACK + sum(_allowed(group) for group in chosen)
    ended = forked(lambda: _killed_by(mutant, chosen, root), limit)
    by = ended.result if ended.result is not None else f"import: {ended.why}"
    ran = sum(len(group) for group in chosen)
    return Verdict(bool(by), by, ran, len(covering), round(ended.seconds, 1), True)


def covering_tests(mutant: Mutant, tests: Sequence[CoveringTest], root: Path) -> list[CoveringTest]:
    """Return the tests that run the mutated statement.

    If there are none, because it runs at import, return those that run the function, or else the
    file.
    """
    text = (root / mutant.file).read_text()
    tree = ast.parse(text)
    file = frozenset(range(1, text.count("\n") + 2))
    for span in (_statement(tree, mutant.line), _function(tree, mutant.line), file):
        covering = [test for test in tests if not span.isdisjoint(test.lines.get(mutant.file, ()))]
        if covering:
            return covering
    return []


def chosen_tests(
    budget: float, covering: Sequence[CoveringTest], mutant: Mutant, start: float
) -> list[list[CoveringTest]]:
    """Return the tests to run, in order, by file.

    Args:
        start: the CPU seconds of a file before its first test.
    """
    files: dict[str, list[CoveringTest]] = defaultdict(list)
    for test in sorted(covering, key=lambda test: test.seconds):
        files[test.file].append(test)
    stem = PurePath(mutant.file).stem

    def order(file: str) -> tuple[bool, bool, float]:
        near = PurePath(file).stem.removeprefix("test_").startswith(stem)
        package = PurePath(file).parts[1:2] == PurePath(mutant.file).parts[1:2]
        return not near, not package, sum(test.seconds for test in files[file][:20])

    chosen = []
    # In two rounds: the quickest tests of each file, then the others.
    for part in (slice(0, 20), slice(20, None)):
        for file in sorted(files, key=order):
            group: list[CoveringTest] = []
            for test in files[file][part]:
                if budget < test.seconds + (0 if group else start):
                    break
                budget -= test.seconds + (0 if group else start)
                group.append(test)
            if group:
                chosen.append(group)
    return chosen


def _allowed(group: Sequence[CoveringTest]) -> float:
    return SLACK + 10 * sum(test.seconds for test in group)


def _killed_by(mutant: Mutant, chosen: Sequence[Sequence[CoveringTest]], root: Path) -> str:
    """Return the test that fails in the package with the mutant, or an empty text."""
    finder = ChangedFile(root, mutant.file, mutant.code)
    sys.meta_path.insert(0, finder)
    os.chdir(root)
    try:
        importlib.import_module(finder.module)
    except Exception as error:
        return f"import: {type(error).__name__}: {error}"
    for group in chosen:
        ended = forked(lambda group=group: _failure(group), _allowed(group))  # type: ignore[misc]
        if ended.result is None:
            return f"{group[0].file}: {ended.why}"
        if ended.result:
            return str(ended.result)
    return ""


def _failure(group: Sequence[CoveringTest]) -> str:
    chosen = Chosen([test.id for test in group])
    code = pytest.main([*OPTIONS, group[0].file], plugins=[chosen])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    return chosen.failed or f"{group[0].file}: {pytest.ExitCode(code).name}"


def _statement(tree: ast.Module, line: int) -> frozenset[int]:
    """Return the lines of the innermost statement at a line, without those of its body."""
    span = frozenset({line})
    for node in ast.walk(tree):  # outer statements first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            end = (node.end_lineno or line) + 1
            if body:
                first = getattr(body[0], "lineno", None) or body[0].pattern.lineno
                end = max(first, node.lineno + 1)
            if line < end:
                span = frozenset(range(node.lineno, end))
    return span


def _function(tree: ast.Module, line: int) -> frozenset[int]:
    """Return the lines of the body of the innermost function at a line."""
    span: frozenset[int] = frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or line):
            span = frozenset(range(node.body[0].lineno, (node.end_lineno or line) + 1))
    return span
