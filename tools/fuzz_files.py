"""Read damaged files: each is a FileFormatError or a valid program, and no code in it may run.

    python -m tools.fuzz_files                       100,000 files
    python -m tools.fuzz_files --count 2000 --seed 7
    python -m tools.fuzz_files --keep build/fuzz     keep the failing and slow files there

The files are read in a process of their own, which may crash: it then goes on with the next file.
Each file has a time limit, and the process a memory limit. The end of the output lists the slowest
files.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.program.damage import damaged
from tests.program.saved_functions import files
from tests.program.watched_reading import load_whole, read, watch, what_it_is

MEMORY = 8 << 30  # bytes that the reading process may map, mostly torch's own code
EXAMPLES = 400  # files for each seed
_RIGHT = ("refused", "loaded")
_SLOW = 1.0  # seconds for one file


def _numbered(
    count: int, seed: int, whole: list[bytes]
) -> Iterator[tuple[int, bytes, bytes, bool]]:
    """Yield damaged files: number, the original's name, bytes, True if checksums are right."""
    for number in range(count):
        if number % EXAMPLES == 0:
            rng = random.Random(seed + number)
        data = rng.choice(whole)
        yield number, data, *damaged(data, rng)


def _work(
    to: Connection, start: int, count: int, seed: int, limit: float, folder: str, keep: Path | None
) -> None:
    """Read the files from a number on, keep the notable ones, and send the result of each."""
    torch.set_num_threads(1)
    path = Path(folder)
    whole = [each.read_bytes() for each in sorted(path.glob("whole*.tsf"))]
    expected = {data: load_whole(path / "f.tsf", data) for data in whole}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    watch()
    for number, data, broken, hostile in _numbered(count, seed, whole):
        if number < start:
            continue
        to.send((number, None, 0.0, 0))
        faulthandler.dump_traceback_later(limit, exit=True)
        before, begin = _peak(), time.process_time()
        verdict = _verdict(path / "f.tsf", broken, None if hostile else expected[data])
        seconds = time.process_time() - begin
        faulthandler.cancel_dump_traceback_later()
        if verdict not in _RIGHT or seconds > _SLOW:
            _keep(keep, number, broken, verdict, seconds)
        to.send((number, verdict, seconds, _peak() - before))
    to.send(None)


def _peak() -> int:
    """Return the peak memory of the process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _verdict(path: Path, broken: bytes, expected: Any) -> str:
    try:
        found = read(path, broken)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[
            :300
        ]
    if found is None:
        return "refused"
    return "loaded" if expected is None or what_it_is(found) == expected else "loaded as another"


def run(count: int, seed: int, limit: float, keep: Path | None) -> int:
    """Read ``count`` files; return the number of failures."""
    verdicts: Counter[str] = Counter()
    times: list[tuple[float, int]] = []
    most = start = 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for i, data in enumerate(list(files(Path(folder)))):
            (Path(folder) / f"whole{i}.tsf").write_bytes(data)
        while start < count:
            receiving, sending = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work, args=(sending, start, count, seed, limit, folder, keep), daemon=True
            )
            worker.start()
            sending.close()
            current = -1
            try:
                while (told := receiving.recv()) is not None:
                    current, verdict, seconds, memory = told
                    if verdict is not None:
                        verdicts[verdict] += 1
                        times.append((seconds, current))
                        most = max(most, memory)
                        if current % 1000 == 999:
                            print(current + 1, dict(verdicts), max(times), flush=True)
                start = count
            except EOFError:  # the process has crashed, or exceeded the limit
                if current < start:
                    raise RuntimeError("the reading process could not be started") from None
                verdicts["crashed, or took too long"] += 1
                read_last = (Path(folder) / "f.tsf").read_bytes()
                _keep(keep, current, read_last, "crashed, or took too long", limit)
                start = current + 1
            worker.join()
    slowest = [f"{seconds:.2f} s (file {number})" for seconds, number in sorted(times)[-5:]]
    print(json.dumps(verdicts, indent=1))
    print("slowest:", ", ".join(slowest), "; most memory of one file:", most >> 20, "MiB")
    return sum(many for name, many in verdicts.items() if name not in _RIGHT)


def _keep(keep: Path | None, number: int, data: bytes, verdict: str, seconds: float) -> None:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{number}.tsf").write_bytes(data)
        (keep / f"{number}.txt").write_text(f"{seconds:.2f} s\n{verdict}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_files")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one file")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    os.environ["TSFUNC_RAGE"] = "off"  # the error record opens files
    return int(run(given.count, given.seed, given.limit, given.keep) > 0)


if __name__ == "__main__":
    sys.exit(main())
