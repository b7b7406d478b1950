"""The record of a run: its contents, its omissions, and the report that is made from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tsfunc
from tsfunc import errors, rage
from tsfunc.rage import event_recorder as keeping
from tsfunc.rage.event_recorder import LONGEST, EventRecorder, scrub


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventRecorder]:
    """A record with a file in the test's own folder."""
    monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "runs"))
    made = EventRecorder()
    monkeypatch.setattr(keeping, "_recorder", made)
    yield made


def files() -> list[Path]:
    folder = keeping.folder_of_files()
    assert folder is not None
    return sorted(folder.glob("*"))


class TestWhatIsKept:
    def test_plain_case(self, recorder: EventRecorder) -> None:
        f = tsfunc.specialize(lambda x, k: x * k)
        f(torch.ones(2), 3)
        f(torch.ones(2), 3)
        (event,) = rage.events()
        assert event.kind == "specialized"
        assert event.facts["reason"] == "the first call"
        assert event.facts["arguments"] == "x: float32[2]"
        assert event.facts["operators"] == 1
        assert "mul(x, 3)" in str(event.facts["program"])
        assert "k is 3 (int)" in str(event.facts["guards"])
        assert str(event.facts["at"]).startswith("test_rage.py:")

    def test_why_there_is_another_program(self, recorder: EventRecorder) -> None:
        f = tsfunc.specialize(lambda x: x + 1)
        f(torch.ones(2))
        f(torch.ones(3))
        assert rage.events()[-1].facts["reason"] == "x.shape[0]: 3, was 2"

    def test_refused_calls(self, recorder: EventRecorder) -> None:
        with pytest.raises(errors.DataDependentError):
            tsfunc.vmap(lambda x: x.nonzero())(torch.ones(3))
        (event,) = rage.events()
        assert event.kind == "error"
        assert event.facts["type"] == "DataDependentError"
        assert "aten::nonzero" in str(event.facts["message"])

    def test_functions_that_failed_in_a_trace(self, recorder: EventRecorder) -> None:
        with pytest.raises(RuntimeError):
            tsfunc.specialize(lambda x: x @ x)(torch.ones(2, 3))
        (event,) = rage.events()
        assert event.kind == "trace failed"
        assert event.facts["type"] == "RuntimeError"
        assert str(event.facts["at"]).startswith("test_rage.py:")

    def test_warnings(self, recorder: EventRecorder) -> None:
        def f(x: Any) -> Any:
            return torch.ops.tsfunc_rage.loops(x)

        with torch.library._scoped_library("tsfunc_rage", "FRAGMENT") as library:
            library.define("loops(Tensor x) -> Tensor")
            library.impl("loops", lambda x: x.clone(), "CPU")
            with pytest.warns(errors.SlowFallbackWarning):
                tsfunc.vmap(f)(torch.ones(2, 3))
        assert [event.facts["type"] for event in rage.events()] == ["SlowFallbackWarning"]

    def test_the_same_in_a_row_is_counted(self, recorder: EventRecorder) -> None:
        for _ in range(3):
            rage.record("loop", size=2)
        rage.record("other")
        assert [(event.kind, event.times) for event in rage.events()] == [("loop", 3), ("other", 1)]
        (run,) = rage.runs()
        assert [(event.kind, event.times) for event in run.events] == [("loop", 3), ("other", 1)]

    def test_memory_holds_the_newest(self, recorder: EventRecorder) -> None:
        for i in range(keeping.EVENTS + 5):
            rage.record("one", i=i)
        assert len(rage.events()) == keeping.EVENTS
        assert rage.events()[-1].facts == {"i": keeping.EVENTS + 4}


class TestWhatIsNotKept:
    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("at /home/jo/secret/train.py:12, in f", "at train.py:12, in f"),
            ('File "/home/jo do/my dir/train.py", line 3', 'File "train.py", line 3'),
            ("'~/secret/x.pt' and ~/secret/y.pt", "'x.pt' and y.pt"),
            (r"C:\Users\jo\train.py:12", "C:train.py:12"),
            ("(/opt/a/b.py:1)", "(b.py:1)"),
            ("sizes n//2, a / b, (n + 1)//2/3 and 1/2", None),
            ("a 3/4 of x/y", None),
            ("got tensor([[1., 2.],\n [3., f(4.)]], device='cpu') here", "got tensor(...) here"),
            ("Parameter(tensor(2.)) and array(1)", "Parameter(...) and array(...)"),
            ("the tensor (a batch)", None),
        ],
    )
    def test_scrubbing(self, text: str, kept: str | None) -> None:
        assert scrub(text) == (text if kept is None else kept)

    def test_folders_whose_names_have_spaces(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = tmp_path / "jo do" / "my work"
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        assert scrub(f"at {folder}/a/train.py:12") == "at train.py:12"

    def test_a_folder_that_is_gone(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        folder = tmp_path / "gone"
        folder.mkdir()
        monkeypatch.chdir(folder)
        folder.rmdir()
        assert scrub("/a/b/c.py") == "c.py"

    @given(st.lists(st.text("abc XYZ09_-.", min_size=1), min_size=2, max_size=5))
    def test_no_folder_of_a_quoted_path_is_kept(self, parts: list[str]) -> None:
        folders = ["<" + part + ">" for part in parts[:-1]]
        text = scrub(f"no file '/{'/'.join([*folders, parts[-1]])}' here")
        assert text == f"no file '{parts[-1]}' here"

    def test_long_texts_are_cut(self) -> None:
        kept = scrub("a" * 10 * LONGEST)
        assert len(kept) < LONGEST + 20
        assert "[...]" in kept

    def test_values_of_tensors_and_folders_in_a_whole_run(self, recorder: EventRecorder) -> None:
        weight = torch.full((3,), 7.0625)
        tsfunc.specialize(lambda x: x @ weight)(torch.full((3,), 9.0625))
        with pytest.raises(errors.DescriptorViolation):
            tsfunc.specialize(lambda x: x, {"x": 3})(torch.full((3,), 9.0625))
        text = rage.bundle()
        assert "specialized" in text and "DescriptorViolation" in text
        assert "0625" not in text
        assert os.path.dirname(__file__) not in text
        assert str(Path.home()) + os.sep not in text


class TestFiles:
    def test_plain_case(self, recorder: EventRecorder) -> None:
        tsfunc.specialize(lambda x: x * 2)(torch.ones(2))
        (run,) = rage.runs()
        assert run.about["torch"] == torch.__version__
        assert run.about["tsfunc"] == tsfunc.__version__
        assert [event.kind for event in run.events] == ["specialized"]
        assert "1 event, 0 refusals" in str(run)
        (file,) = files()
        assert file.stat().st_mode & 0o777 == 0o600

    def test_without_an_event_there_is_none(self, recorder: EventRecorder) -> None:
        assert rage.runs() == []

    @pytest.mark.parametrize("said", ["off", "0", "No"])
    def test_turned_off(
        self, recorder: EventRecorder, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(keeping.VARIABLE, said)
        rage.record("one")
        assert keeping.folder_of_files() is None
        assert rage.runs() == []
        assert len(rage.events()) == 1

    def test_the_users_own_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(keeping.VARIABLE)
        folder = keeping.folder_of_files()
        assert folder is not None
        assert folder.name == "rage"
        assert "tsfunc" in folder.parts

    def test_a_file_does_not_grow_without_bound(self, recorder: EventRecorder) -> None:
        for i in range(120):
            rage.record("one", text="x" * LONGEST, i=i)
        (file,) = files()
        assert file.stat().st_size <= keeping.BYTES
        (run,) = rage.runs()
        assert run.about["torch"] == torch.__version__
        assert run.events[-1].facts["i"] == 119

    def test_the_oldest_files_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(keeping.VARIABLE, str(tmp_path))
        for i in range(keeping.RUNS + 3):
            (tmp_path / f"20200101-0000{i:02}-1.jsonl").write_text("{}\n")
        EventRecorder().record("one", {})
        assert len(files()) == keeping.RUNS
        assert not (tmp_path / "20200101-000000-1.jsonl").exists()
        assert [event.kind for event in rage.runs()[0].events] == ["one"]

    def test_where_nothing_can_be_written_nothing_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(keeping.VARIABLE, str(tmp_path / "file" / "folder"))
        made = EventRecorder()
        made.record("one", {})
        made.record("two", {})
        assert [event.kind for event in made.events] == ["one", "two"]

    def test_damaged_lines_are_left_out(self, recorder: EventRecorder) -> None:
        rage.record("one")
        (file,) = files()
        with file.open("ab") as out:
            out.write(b'\xff\xfe\n[1]\n{"seconds": "x", "kind": 1}\n{"seconds": 1.0, "ki')
        (run,) = rage.runs()
        assert [event.kind for event in run.events] == ["one"]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
    def test_a_forked_process_has_a_file_of_its_own(self, tmp_path: Path) -> None:
        code = (
            "import os; from tsfunc import rage; rage.record('parent'); pid = os.fork();\n"
            "rage.record('child') if pid == 0 else os.waitpid(pid, 0)"
        )
        env = {**os.environ, keeping.VARIABLE: str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)
        kinds = [[event.kind for event in run.events] for run in rage.runs(tmp_path)]
        assert sorted(kinds) == [["child"], ["parent"]]


class TestBundles:
    def test_plain_case(self, recorder: EventRecorder) -> None:
        tsfunc.specialize(lambda x: x * 2)(torch.ones(2))
        text = rage.bundle()
        assert text.startswith("# tsfunc: rage\n")
        assert f"- torch: {torch.__version__}" in text
        assert "specialized" in text
        assert "    def program(args):" in text

    def test_a_run_from_its_file_is_the_same(self, recorder: EventRecorder) -> None:
        rage.record("one", text="two\nlines")
        (run,) = rage.runs()
        assert rage.bundle(run) == rage.bundle()

    def test_files_are_lines_of_json(self, recorder: EventRecorder) -> None:
        rage.record("one", i=1)
        (file,) = files()
        about, event = map(json.loads, file.read_text().splitlines())
        assert about["python"].startswith("3.")
        assert (event["kind"], event["facts"]) == ("one", {"i": 1})
