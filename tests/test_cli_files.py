"""The commands that read files of programs: show, verify, export; and the version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import tsfunc
from tests.test_cli import run
from tsfunc import cli


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weight = torch.full((3,), 2.0)

    def choice(x: Tensor) -> Tensor:
        y = x @ weight
        return tsfunc.cond(y.sum() > 0, torch.sin, torch.cos, y)

    f = tsfunc.specialize(choice, {"x": tsfunc.MetaTensorType(["n", 3])})
    f(torch.ones(4, 3))
    path = tmp_path / "choice.tsf"
    f.program.save(path)
    return path


def test_the_versions() -> None:
    assert run("--version").strip() == f"tsfunc {tsfunc.__version__}, torch {torch.__version__}"


def test_all_overloads_of_an_operator() -> None:
    lines = run("ops", "add").splitlines()
    assert lines[0].split() == ["overload", "category", "under", "vmap"]
    assert [line.split()[0] for line in lines[1:]] == [
        f"aten::add.{name}" for name in ("Scalar", "Scalar_out", "Tensor", "out")
    ]


def test_show_has_code_lines_guards_and_bodies(file: Path) -> None:
    text = run("show", str(file))
    assert "# program 1 of 1" in text
    assert "def choice(args):" in text and "def true_fun(" in text
    assert "test_cli_files.py:" in text and "y = x @ weight" in text
    assert "float32[n, 3]" in text and "weight" in text and "lifted_" not in text
    assert "guards:\n" in text and "f32[n, 3] cpu no_grad contiguous" in text


def test_show_in_a_terminal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(force_terminal=True, width=200, record=True)
    monkeypatch.setattr(cli, "Console", lambda: terminal)
    run("show", str(file))
    assert "def choice(args):" in terminal.export_text()


def test_show_writes_a_page(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert "1 program of choice" in run("show", str(file), "--html", str(page))
    assert page.read_text().startswith("<!doctype html>")


def test_verify(file: Path, tmp_path: Path) -> None:
    assert run("verify", str(file)).strip() == f"{file}: 1 program of choice verified."
    damaged = tmp_path / "damaged.tsf"
    damaged.write_bytes(file.read_bytes()[:-40])
    assert "damaged.tsf" in run("verify", str(damaged), code=1)
    assert "No such file" in run("verify", str(tmp_path / "none.tsf"), code=1)


def test_export_for_torch(file: Path, tmp_path: Path) -> None:
    x = torch.randn(5, 3)
    assert f"Wrote {file.with_suffix('.pt2')}" in run("export", str(file), "--to", "pt2")
    module = torch.export.load(file.with_suffix(".pt2")).module()
    assert module(x).equal(tsfunc.load(file)(x))
    other = tmp_path / "other.pt2"
    run("export", str(file), "--to", "pt2", "-o", str(other))
    assert other.exists()
    assert "there is no program 2. It has 1 program" in run(
        "export", str(file), "--to", "pt2", "--program", "2", code=1
    )


def test_export_for_onnx(tmp_path: Path) -> None:
    """The model has the names of the arguments, takes other sizes, and computes the same."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: tsfunc[onnx]")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: tsfunc[onnx]")
    from onnx.reference import ReferenceEvaluator

    weight = torch.randn(3)

    def model(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ weight + shift).tanh()
        branch: Tensor = tsfunc.cond(y.sum() > 0, torch.sin, torch.cos, y)
        return branch, x.softmax(1)

    descriptors = {"x": tsfunc.MetaTensorType(["n", 3]), "shift": tsfunc.MetaTensorType(["n"])}
    program = tsfunc.specialize(model, descriptors)
    program(torch.ones(4, 3), torch.ones(4))
    path = tmp_path / "model.tsf"
    program.save(path)
    run("export", str(path), "--to", "onnx")
    written = onnx.load(path.with_suffix(".onnx"))
    onnx.checker.check_model(written)
    assert [value.name for value in written.graph.input] == ["x", "shift"]
    for size in (2, 7):
        x, shift = torch.randn(size, 3), torch.randn(size)
        given = {"x": x.numpy(), "shift": shift.numpy()}
        found = ReferenceEvaluator(written).run(None, given)
        for got, expected in zip(found, program(x, shift), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), expected)


def test_export_for_onnx_names_the_missing_package(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    text = run("export", str(file), "--to", "onnx", code=1)
    assert "needs another package" in text and "pip install 'tsfunc[onnx]'" in text


def test_an_unknown_format_is_refused(file: Path) -> None:
    assert CliRunner().invoke(cli.app, ["export", str(file), "--to", "tf"]).exit_code == 2


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own warning
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own warning
def test_export_compiled(file: Path) -> None:
    run("export", str(file), "--to", "aoti")
    package = torch._inductor.aoti_load_package(str(file.with_suffix(".aoti.pt2")))
    x = torch.randn(5, 3)
    torch.testing.assert_close(package(x), tsfunc.load(file)(x))
