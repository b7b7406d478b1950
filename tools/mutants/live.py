"""Judge mutants in forks of a process that has imported tsfunc and collected the tests.

A fork replaces the code of the mutated functions in every place that refers to them: a module, a
class, a table or a closure. That takes a tenth of a second; a new import and collection take
seconds. A mutant of code that runs at import has no effect here, and is judged with a new import.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tools.mutants.drawing import Mutant
from tools.mutants.forks import ForkError, forked, limit
from tools.mutants.killing import SLACK, Verdict, chosen_tests, covering_tests
from tools.mutants.recording import OPTIONS, CoveringTest

Functions = dict[CodeType, list[FunctionType]]
Report = Callable[[Mutant, Verdict], None]


class Judge:
    """A plugin of pytest that judges mutants by the collected tests instead of running them."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        tests: Sequence[CoveringTest],
        root: Path,
        budget: float,
        report: Report,
    ) -> None:
        self._mutants = mutants
        self._tests = tests
        self._root = root
        self._budget = budget
        self._report = report
        self._failed = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # the suite hides its objects from the collector, which lists the functions
        functions = functions_of(self._root, {mutant.file for mutant in self._mutants})
        gc.freeze()  # forks share these objects
        for mutant in self._mutants:
            self._report(mutant, self._judged(mutant, items, functions))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def _judged(
        self, mutant: Mutant, items: dict[str, pytest.Item], functions: Functions
    ) -> Verdict:
        covering = covering_tests(mutant, self._tests, self._root)
        groups = chosen_tests(self._budget, covering, mutant, start=0)
        tests = [test for group in groups for test in group if test.id in items]
        exchanged = list(_exchanges(mutant, self._root, functions))
        if not tests or not exchanged:
            return Verdict(False, "", 0, len(covering), 0.0, False)

        def failure() -> str:
            for function, code in exchanged:
                function.__code__ = code
            following = [*(items[test.id] for test in tests[1:]), None]
            for test, after in zip(tests, following, strict=True):
                limit(resource.RLIMIT_CPU, int(time.process_time() + SLACK + 10 * test.seconds))
                item = items[test.id]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self._failed:
                    break
            return self._failed

        ended = forked(failure, SLACK + 10 * sum(test.seconds for test in tests))
        by = ended.result if ended.result is not None else f"a test: {ended.why}"
        return Verdict(bool(by), by, len(tests), len(covering), round(ended.seconds, 1), False)


def judge(
    mutants: Sequence[Mutant],
    tests: Sequence[CoveringTest],
    root: Path,
    budget: float,
    report: Report,
) -> None:
    """Judge mutants in a fork that imports tsfunc, and report each verdict.

    Raises:
        ForkError: pytest could not collect the tests.
    """

    def work() -> int:
        os.chdir(root)
        files = list(dict.fromkeys(test.file for test in tests))
        plugin = Judge(mutants, tests, root, budget, report)
        return int(pytest.main([*OPTIONS, "-m", "", *files], plugins=[plugin]))

    ended = forked(work, seconds=1e6)
    if ended.result != pytest.ExitCode.OK:
        raise ForkError(f"pytest ended with {ended.result}: {ended.why}")


def functions_of(root: Path, files: set[str]) -> Functions:
    """Return the live functions of some files, by their code."""
    paths = {str(root / file) for file in files}
    found: Functions = defaultdict(list)
    for value in gc.get_objects():
        # ``isinstance`` would ask proxies for their class.
        if type(value) is FunctionType and value.__code__.co_filename in paths:
            found[value.__code__].append(value)
    return found


def _exchanges(
    mutant: Mutant, root: Path, functions: Functions
) -> Iterator[tuple[FunctionType, CodeType]]:
    """Return the functions that a mutant changes, and their new code."""
    path = root / mutant.file
    old = compile(path.read_text(), str(path), "exec", dont_inherit=True)
    new = compile(mutant.code, str(path), "exec", dont_inherit=True)
    for before, after in _pairs(old, new):
        if before != after and before.co_freevars == after.co_freevars:
            for function in functions.get(before, ()):
                yield function, after


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    inner = [[const for const in code.co_consts if isinstance(const, CodeType)]
             for code in (old, new)]  # fmt: skip
    if len(inner[0]) == len(inner[1]):
        for before, after in zip(*inner, strict=True):
            yield from _pairs(before, after)
