"""The command: its output, in a terminal and elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tsfunc import cli
from tsfunc.rage.event_recorder import EventRecorder

ROOT = Path(__file__).resolve().parent.parent


def run(*args: str, code: int = 0) -> str:
    """Run the command; return its output on both streams."""
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == code, result.output
    return result.output


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_census() -> None:
    lines = cells(run("ops"))
    assert lines[0] == ["category", "now", "2020"]
    assert ["TensorIterator", "505"] in [[line[0], line[-1]] for line in lines]
    assert lines[-1][0] == "all"
    assert lines[-1][2] == "1364"
    assert sum(int(line[1]) for line in lines[1:-1]) == int(lines[-1][1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "aten::index_add",
            [
                "N-Dimensional",
                "decided: elements chosen",
                "named by",
                "rule index_write",
                "indexing.py",
            ],
        ),
        ("addmm", ["aten::addmm", "Fixed", "self 0-2, mat1 2, mat2 2", "rule addmm"]),
        ("aten::rand_like.out", ["follows aten::rand_like", "random", "writes", "then copied"]),
        ("aten::l1_loss", ["Composite", "by its parts, as torch composes it"]),
        ("aten::nonzero", ["Dynamic", "data-dependent"]),
    ],
)
def test_one_operator(name: str, expected: Sequence[str]) -> None:
    text = run("ops", name)
    for part in expected:
        assert part in text


def test_a_category() -> None:
    text = run("ops", "--category", "flatten")
    assert "aten::take  " in text
    assert "decided: elements counted in the order of memory" in text
    assert "aten::sin" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing_like_it"], "torch has no operator of this name"),
        (["--category", "Flat"], "There is no category 'Flat'. There are: TensorIterator, Fixed,"),
    ],
)
def test_a_name_that_there_is_not(args: list[str], message: str) -> None:
    assert message in run("ops", *args, code=1)


def test_in_a_terminal_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(force_terminal=True, width=80, record=True)
    monkeypatch.setattr(cli, "Console", lambda: terminal)
    run("ops")
    text = terminal.export_text()
    assert "┃ category" in text
    assert "│ TensorIterator" in text


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "tsfunc", "ops", "aten::sin"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert cells(out)[:2] == [["operator", "aten::sin"], ["category", "TensorIterator"]]
    assert "rule pointwise, tsfunc/ops/tensor_iterator.py:" in out


def test_help_names_the_command() -> None:
    assert "ops" in run("--help")
    assert "--category" in run("ops", "--help")


class TestRage:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TSFUNC_RAGE", str(tmp_path))
        for kind in ("older", "newer"):
            EventRecorder().record(kind, {"size": 3})
            (made,) = tmp_path.glob("2*")
            made.rename(tmp_path / f"{kind != 'older':d}.jsonl")
        return tmp_path

    def test_the_newest_run(self) -> None:
        text = run("rage")
        assert "newer" in text and "- size: 3" in text
        assert "older" not in text

    def test_a_run_by_its_number(self) -> None:
        assert "older" in run("rage", "2")
        assert "There is no run 3. There are 2" in run("rage", "3", code=1)

    def test_the_list(self) -> None:
        lines = cells(run("rage", "--list"))
        assert [line[0] for line in lines] == ["run", "1", "2"]
        assert lines[1][-4:] == ["1", "event,", "0", "refusals"]

    def test_into_a_file(self, tmp_path: Path) -> None:
        assert run("rage", "--output", str(tmp_path / "bundle.md")) == ""
        assert (tmp_path / "bundle.md").read_text().startswith("# tsfunc: rage")

    def test_a_terminal_prompts_for_a_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "_in_a_terminal", lambda: True)
        result = CliRunner().invoke(cli.app, ["rage"], input="2\n")
        assert "Which run" in result.output
        assert "older" in result.output

    def test_there_is_none(self, tmp_path: Path) -> None:
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        assert "No run is remembered. Files are kept in " in run("rage", code=1)
