"""A damaged file raises FileFormatError or is a valid program, and no code in it runs.

``python -m tools.fuzz_files`` reads a hundred thousand files; the quick suite some hundreds.
"""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from tests.program import saved_functions
from tests.program.damage import damaged
from tests.program.watched_reading import (
    Forbidden,
    load_whole,
    nothing_run,
    read,
    watch,
    what_it_is,
)
from tsfunc import load


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return list(saved_functions.files(tmp_path_factory.mktemp("files")))


@pytest.fixture(scope="module", autouse=True)
def _audited(files: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import the modules that load lazily, before files are watched."""
    path = tmp_path_factory.mktemp("warm") / "f.tsf"
    for data in files:
        path.write_bytes(data)
        load(path)
    watch()


def run(files: list[bytes], seed: int, count: int, path: Path) -> int:
    """Read a number of damaged files; return how many were programs."""
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


def test_damaged_files(files: list[bytes], tmp_path: Path) -> None:
    loaded = run(files, 0, 400, tmp_path / "f.tsf")
    assert 0 < loaded < 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_more_damaged_files(seed: int, files: list[bytes], tmp_path: Path) -> None:
    run(files, seed, 1000, tmp_path / "f.tsf")


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


def test_the_watch_sees_forbidden_calls() -> None:
    code = compile("1", "<other>", "eval")
    with pytest.raises(Forbidden, match="exec"), nothing_run():
        exec(code)
    with pytest.raises(Forbidden, match="open"), nothing_run():
        Path("/etc/hostname").read_text()
