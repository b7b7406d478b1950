"""Tasks of the sweep in processes of their own, with the results in a file.

A task is a row of the operator database, a type and a mode. Some of torch's operators crash the
process: a task that does so is tried again with torch's side alone, which tells whose fault it is.
A file that exists is gone on with: its tasks are not done again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from tests.ops import derivative_sweep, derivatives, named_sweep
from tests.ops.database import VARIANTS, Row, rows
from tests.ops.sweep import VMAP, VMAP_VMAP, Mode, Outcome, Verdict, sweep

MODES = {mode.name: mode for mode in (VMAP, VMAP_VMAP, *derivatives.MODES, *derivatives.FURTHER)}
PLAIN = (VMAP.name, VMAP_VMAP.name)  # the modes without derivatives
DERIVATIVES = tuple(mode.name for mode in derivatives.MODES)
NAMED = tuple(named_sweep.WAYS)  # of specialize, with names for sizes
KEPT = 3  # messages of each kind that are kept of a task
LIMIT = 300  # seconds for a task


@dataclass(frozen=True)
class Task:
    """``most``: how many samples of the row; None for all. ``plain``: torch's side alone."""

    row: str
    dtype: str
    mode: str
    most: int | None = None
    plain: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.row, self.dtype, self.mode)


@dataclass
class Result:
    """How a task went.

    Attributes:
        verdict: the worst of all batches'.
        counts: how many batches had each verdict.
        messages: of each verdict but OK some: the verdict, the batch, and what was said.
        most: how many samples of the row were tried at most; None for all.
    """

    row: str
    dtype: str
    mode: str
    verdict: str
    counts: dict[str, int] = field(default_factory=dict)
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0
    most: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.row, self.dtype, self.mode)


def tasks_of(
    modes: Iterable[str],
    dtypes: Iterable[str] | None = None,
    most: int | None = None,
    variants: Iterable[str] = VARIANTS,
) -> Iterator[Task]:
    """Every row of these variants in the types given, by default all that it lists."""
    wanted = None if dtypes is None else set(dtypes)
    for mode in modes:
        for row in (row for row in rows() if row.variant in variants):
            for dtype in sorted(str(d).removeprefix("torch.") for d in _types(row, mode)):
                if wanted is None or dtype in wanted:
                    yield Task(row.name, dtype, mode, most)


def _types(row: Row, mode: str) -> frozenset[torch.dtype]:
    return row.dtypes if mode in (*PLAIN, *NAMED) else row.differentiable


def run_task(task: Task) -> Result:
    """Does a task in this process."""
    row = next(row for row in rows() if row.name == task.row)
    start = time.monotonic()
    counts: Counter[str] = Counter()
    kept: dict[Verdict, list[tuple[str, str, str]]] = {}
    worst = Verdict.NONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for outcome in _outcomes(row, task):
            counts[outcome.verdict.name] += 1
            worst = max(worst, outcome.verdict)
            some = kept.setdefault(outcome.verdict, [])
            if outcome.verdict is not Verdict.OK and len(some) < KEPT:
                some.append((outcome.verdict.name, outcome.what[:300], outcome.message[:600]))
    messages = [message for verdict in sorted(kept, reverse=True) for message in kept[verdict]]
    seconds = round(time.monotonic() - start, 2)
    return Result(*task.key, worst.name, dict(counts), messages, seconds, task.most)


def _outcomes(row: Row, task: Task) -> Iterator[Outcome]:
    dtype = getattr(torch, task.dtype)
    if task.mode in NAMED:
        return named_sweep.sweep(row, dtype, task.mode, task.most, task.plain)
    mode: Mode = MODES[task.mode]
    if task.plain:
        mode = dataclasses.replace(mode, ours=mode.plain, split=None, drawn=())
    return (sweep if task.mode in PLAIN else derivative_sweep.sweep)(row, dtype, mode, task.most)


def serve() -> None:
    """Does the tasks that come by the line; prints a line for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is not a result
    for line in sys.stdin:
        signal.alarm(LIMIT)
        result = run_task(Task(**json.loads(line)))
        signal.alarm(0)
        print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)


class _Server:
    """A process that does tasks, and another one when it has died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, task: Task) -> Result | int:
        """Its result, or what the process ended with."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from tools.sweeping import serve; serve()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        process = self.process
        to, back = _pipe(process.stdin), _pipe(process.stdout)
        print(json.dumps(dataclasses.asdict(task)), file=to, flush=True)
        line = back.readline()
        if line:
            return Result(**json.loads(line))
        self.process = None
        return process.wait()

    def close(self) -> None:
        if self.process is not None:
            _pipe(self.process.stdin).close()
            self.process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _do(server: _Server, task: Task) -> Result:
    answer = server.ask(task)
    if isinstance(answer, Result):
        return answer
    how = "took too long" if answer == -signal.SIGALRM else f"the process ended with {answer}"
    if answer > 0:  # an error of Python, which is the sweep's own
        return Result(*task.key, Verdict.FAIL.name, messages=[(Verdict.FAIL.name, "", how)])
    alone = server.ask(dataclasses.replace(task, plain=True))
    if isinstance(alone, Result):
        return Result(*task.key, Verdict.FAIL.name, messages=[(Verdict.FAIL.name, "", how)])
    said = f"torch alone: {how}"
    return Result(*task.key, Verdict.NONE.name, messages=[(Verdict.NONE.name, "", said)])


def read(path: Path) -> list[Result]:
    """The results in a file; the last one of each task."""
    if not path.exists():
        return []
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return list({result.key: result for result in results}.values())


def forget(path: Path, verdicts: Iterable[str]) -> None:
    """Takes the results with these verdicts out of a file."""
    kept = [result for result in read(path) if result.verdict not in set(verdicts)]
    path.write_text("".join(json.dumps(dataclasses.asdict(result)) + "\n" for result in kept))


def run(tasks: Iterable[Task], path: Path, workers: int = 2) -> None:
    """Does those of the tasks that the file has no result of, and adds theirs to it."""
    done = {result.key for result in read(path)}
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        if task.key not in done:
            waiting.put(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def work(file: Any) -> None:
        server = _Server()
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                break
            result = _do(server, task)
            with lock:
                print(json.dumps(dataclasses.asdict(result)), file=file, flush=True)
        server.close()

    with path.open("a") as file:
        threads = [threading.Thread(target=work, args=(file,)) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def parser(prog: str, description: str | None, file: Path, most: int) -> argparse.ArgumentParser:
    """The options that every sweep has; ``file`` and ``most`` are what they are by default."""
    options = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--most", type=int, default=most, help="samples of a row")
    options.add_argument("--match", default="", help="rows whose names have this pattern")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--file", type=Path, default=file)
    options.add_argument("--anew", default="", help="verdicts whose rows are done again")
    options.add_argument("--note", default="", help="a sentence for the page: what was tried")
    options.add_argument("--report", action="store_true", help="write the page alone")
    return options


def results_of(tasks: Iterable[Task], options: argparse.Namespace) -> list[Result]:
    """Return the contents of the file once the tasks that the options ask for are done."""
    if not options.report:
        if options.anew:
            forget(options.file, options.anew.split(","))
        wanted = (task for task in tasks if re.search(options.match, task.row))
        run(wanted, options.file, options.workers)
    return read(options.file)
