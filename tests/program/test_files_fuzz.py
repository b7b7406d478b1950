"""Damaged files: each is a FileFormatError or a program, and nothing in it is run.

``make test-all`` reads a hundred thousand of them; the quick suite some hundreds.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.program.damage import damaged
from tsfunc import MetaTensorType as Meta
from tsfunc import load, specialize
from tsfunc.errors import FileFormatError
from tsfunc.transforms.files import LoadedFunction


class Out(NamedTuple):
    z: Any
    n: Any


TIED = torch.randn(3, 4)
PART = TIED[:, ::2]


def whole(x: Tensor, y: Tensor, *, k: float) -> dict[str, Any]:
    """Named dims, numbers, several results, containers, aliased state, constants."""
    h = F.linear(x, TIED) * k
    top, at = h.max(0)
    a, *_ = h.unbind(1)
    made = torch.ones(x.shape[0] * 2 + y.shape[0], dtype=torch.float64)
    return {"out": Out(top, [at, None, x.shape[0] + 1]), "a": a[1:], "made": made, "p": PART + 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("files") / "f.tsf"
    f = specialize(whole, {"x": Meta(["n", 4]), "y": Meta(["m"])})
    f(torch.randn(5, 4), torch.randn(2), k=2.0)
    f.save(path)
    found = [path.read_bytes()]
    net = specialize(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()))
    net(torch.randn(6, 4))
    net.save(path, exact=True)
    return [*found, path.read_bytes(), path.read_bytes()]  # the small one twice as often


class _Forbidden(Exception):
    """Something was done that reading must not do."""


_watching = False
# Generated code is compiled and run; `ast.parse`, which runs nothing, compiles "<unknown>".
_OWN = ("<program ", "<reach>", "<type check>", "<unknown>", "<string>")
_QUIET = ("object.__", "gc.", "sys._getframe", "code.__new__", "builtins.id", "os.listdir")


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching or event.startswith(_QUIET) or event in ("tempfile.mkstemp",):
        return
    if event == "open" and str(args[0]).endswith((".tsf", ".py")):
        return
    if event == "compile" and (args[1] is None or str(args[1]).startswith(_OWN)):
        return
    if event == "exec" and args[0].co_filename.startswith(_OWN):
        return
    raise _Forbidden(f"{event} {args!r}"[:300])


@contextmanager
def nothing_run() -> Iterator[None]:
    """In the block no module is imported, no file opened but the one that is read."""
    global _watching
    _watching = True
    try:
        yield
    finally:
        _watching = False


@pytest.fixture(scope="module", autouse=True)
def _audited(files: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is imported late is imported before the first file is watched."""
    path = tmp_path_factory.mktemp("warm") / "f.tsf"
    for data in files:
        path.write_bytes(data)
        load(path)
    sys.addaudithook(_hook)


def read(path: Path, data: bytes) -> LoadedFunction | None:
    """What a damaged file gives: a function, or None for the error that it should be."""
    path.write_bytes(data)
    try:
        with nothing_run():
            return load(path)
    except FileFormatError as error:
        assert str(error).startswith(str(path))
        return None


def run(files: list[bytes], seed: int, count: int, path: Path) -> int:
    """Reads so many damaged files; how many were read as programs."""
    rng = random.Random(seed)
    whole = {data: load_whole(path, data) for data in files}
    loaded = 0
    for number in range(count):
        data = rng.choice(files)
        broken, hostile = damaged(data, rng)
        try:
            found = read(path, broken)
        except BaseException as error:
            raise AssertionError(f"file {number} of seed {seed}: {error!r}") from error
        if found is not None:
            loaded += 1
            assert hostile or what_it_is(found) == whole[data], f"file {number} of seed {seed}"
    return loaded


def load_whole(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return what_it_is(load(path))


def what_it_is(function: LoadedFunction) -> Any:
    """What makes a function equal to another."""
    return [
        (p.source, p.out_tree, [(n, t.tolist(), t.dtype) for n, t in p.lifted.items()])
        for p in function.programs
    ]


def test_damaged_files(files: list[bytes], tmp_path: Path) -> None:
    loaded = run(files, 0, 400, tmp_path / "f.tsf")
    assert 0 < loaded < 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 51))
def test_a_hundred_thousand_damaged_files(seed: int, files: list[bytes], tmp_path: Path) -> None:
    run(files, seed, 2000, tmp_path / "f.tsf")


def test_reading_takes_memory_in_proportion(files: list[bytes], tmp_path: Path) -> None:
    rng = random.Random(7)
    tracemalloc.start()
    try:
        for _ in range(60):
            broken, _ = damaged(files[1], rng)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            read(tmp_path / "f.tsf", broken)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 3_000_000 + 60 * len(broken)
    finally:
        tracemalloc.stop()


def test_the_watch_sees_what_is_forbidden() -> None:
    code = compile("1", "<other>", "eval")
    with pytest.raises(_Forbidden, match="exec"), nothing_run():
        exec(code)
    with pytest.raises(_Forbidden, match="open"), nothing_run():
        Path("/etc/hostname").read_text()
