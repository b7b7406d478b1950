"""Mutants: random changes, which a test that fails kills."""

from __future__ import annotations

import random
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="mutmut comes with make setup")

from tools.mutants.drawing import Mutant, Source, draw, found_again
from tools.mutants.forks import ForkError, forked
from tools.mutants.killing import Verdict, judged
from tools.mutants.live import judge
from tools.mutants.recording import CoveringTest, recorded

CODE = '''
"""Numbers."""

from typing import TYPE_CHECKING, cast

LIMIT = 7

if TYPE_CHECKING:
    def unseen(x: int) -> int: return x + 1


def once(name: str):
    return lambda f: f


@once("a name")
def bounded(x: int, top: "int" = 3) -> int:
    """Return x, or the top."""
    if x > top:
        x = top
    if x < -top:
        raise ValueError("too small: " + str(x - 1))
    return x


class Sum:
    """A sum."""

    kind = "sum"

    def of(self, x: int) -> int:
        assert isinstance(x, int)
        return cast("int", x) + 1

    def __repr__(self) -> str:
        return "a" + "sum"
'''

TESTS = """
from numbers_of_mine.core import Sum, bounded


def test_bounded():
    assert [bounded(x) for x in (2, 4)] == [2, 3]


def test_nothing():
    Sum().of(1)
"""

# As in ``tests/conftest.py``.
CONFTEST = """
import gc


def pytest_collection_finish():
    gc.freeze()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a package and tests."""
    files = {
        "numbers_of_mine/__init__.py": "",
        "numbers_of_mine/core.py": CODE,
        "test_it.py": TESTS,
        "conftest.py": CONFTEST,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def mutants_of(root: Path) -> list[Mutant]:
    source = Source(root / "numbers_of_mine/core.py", root)
    return draw([source], 1000, random.Random(0))


def mutant_to(root: Path, after: str) -> Mutant:
    (mutant,) = (mutant for mutant in mutants_of(root) if mutant.after == after)
    return mutant


def recorded_tests(root: Path) -> list[CoveringTest]:
    return recorded(
        "test_it.py", ["numbers_of_mine/core.py"], root, root / "kept", "not slow", False
    )


def test_functions_are_changed_and_nothing_that_does_not_run(root: Path) -> None:
    changed = {(mutant.function, mutant.before, mutant.after) for mutant in mutants_of(root)}
    assert ("bounded", "if x > top:", "if x >= top:") in changed
    assert ("bounded", "x = top", "x = None") in changed
    assert ('bounded', 'def bounded(x: int, top: "int" = 3) -> int:',
            'def bounded(x: int, top: "int" = 4) -> int:') in changed  # fmt: skip
    assert {name for name, _, _ in changed} == {"once", "once.<lambda>", "bounded", "Sum.of"} - {
        "once"
    }
    befores = {before for _, before, _ in changed}
    for unseen in ("Numbers", "LIMIT", "too small", "isinstance", "kind", "a name", "Return x"):
        assert not any(unseen in before for before in befores), unseen
    assert {after for _, before, after in changed if "cast" in before} == {
        'return cast("int", x) - 1', 'return cast("int", x) + 2'
    }  # fmt: skip


def test_a_seed_repeats_its_sample(root: Path) -> None:
    source = Source(root / "numbers_of_mine/core.py", root)
    seed = random.SystemRandom().randrange(2**32)
    first, again = (draw([source], 5, random.Random(seed)) for _ in range(2))
    assert first == again and len(first) == 5, seed


def test_a_mutant_is_found_again_after_other_changes(root: Path) -> None:
    mutant = mutant_to(root, "if x >= top:")
    path = root / "numbers_of_mine/core.py"
    path.write_text("# moved\n\n" + path.read_text())
    again = found_again(Source(path, root), mutant.same)
    assert again is not None and again.line == mutant.line + 2
    path.write_text(path.read_text().replace("x > top", "top < x"))
    assert found_again(Source(path, root), mutant.same) is None


def test_the_record_has_the_lines_of_each_test(root: Path) -> None:
    lines = {test.id: test.lines["numbers_of_mine/core.py"] for test in recorded_tests(root)}
    text = (root / "numbers_of_mine/core.py").read_text().splitlines()
    compared, added = (
        next(number for number, line in enumerate(text, 1) if part in line)
        for part in ("x > top", 'cast("int"')
    )
    covered = {name: {compared, added} & found for name, found in lines.items()}
    assert covered == {"test_it.py::test_bounded": {compared}, "test_it.py::test_nothing": {added}}


# The test that notices it, and the number of tests that run its line.
FATES = {
    "x = None": ("test_it.py::test_bounded", 1),
    "return lambda f: None": ("test_it.py::test_bounded", 2),  # at import
    "if x >= top:": ("", 1),  # equal
    'return cast("int", x) - 1': ("", 1),  # not tested
}


@pytest.mark.parametrize("after", FATES)
def test_a_failing_test_kills_and_its_absence_lets_live(root: Path, after: str) -> None:
    verdict = judged(mutant_to(root, after), recorded_tests(root), root, 60)
    by, ran = FATES[after]
    assert (verdict.killed, verdict.ran, verdict.fresh) == (bool(by), ran, True)
    assert verdict.by.startswith(by)


def test_mutants_are_judged_alike_in_a_live_process(root: Path) -> None:
    """Mutants of code that runs at import are the exception: a live process does not run it."""
    verdicts = root / "verdicts"

    def report(mutant: Mutant, verdict: Verdict) -> None:
        with verdicts.open("a") as file:
            file.write(f"{mutant.after}|{verdict.by}|{verdict.ran}|{verdict.fresh}\n")

    judge([mutant_to(root, after) for after in FATES], recorded_tests(root), root, 60, report)
    assert verdicts.read_text().splitlines() == [
        f"{after}|{by if ran < 2 else ''}|{ran}|False" for after, (by, ran) in FATES.items()
    ]


def test_a_test_that_does_not_end_kills(root: Path) -> None:
    """The limit is ten times the test's time, and twenty seconds; here it is less."""
    ended = forked(lambda: _busy(), 0.5)
    assert (ended.result, ended.why) == (None, "timeout")


def test_an_error_of_a_fork_is_not_a_verdict() -> None:
    assert forked(lambda: sys.maxsize, 20).result == sys.maxsize
    with pytest.raises(ForkError, match="ZeroDivisionError"):
        forked(lambda: 1 // 0, 20)


def _busy() -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass
