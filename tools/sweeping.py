"""Run the tasks of a sweep in other processes, with the results in a file.

A task is a row of the operator database, a dtype and a mode. Some of torch's operators crash the
process: their tasks run again with torch's side alone, which shows if torch is the cause. An
existing file is continued: tasks with a result are not run again.
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
NAMED = tuple(named_sweep.WAYS)  # modes of specialize, with named sizes
KEPT = 3  # messages of each verdict that a task keeps
LIMIT = 300  # seconds for each task


@dataclass(frozen=True)
class Task:
    """``most``: number of samples of the row; None for all. ``plain``: run torch's side alone."""

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
    """The result of a task.

    Attributes:
        verdict: the worst verdict of all batches.
        counts: the number of batches with each verdict.
        messages: some messages for each verdict but OK: the verdict, the batch, and the text.
        most: the largest number of samples tried; None for all.
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
    """Yield every row of these variants in these dtypes; the default is all dtypes of the row."""
    wanted = None if dtypes is None else set(dtypes)
    for mode in modes:
        for row in (row for row in rows() if row.variant in variants):
            for dtype in sorted(str(d).removeprefix("torch.") for d in _types(row, mode)):
                if wanted is None or dtype in wanted:
                    yield Task(row.name, dtype, mode, most)


def _types(row: Row, mode: str) -> frozenset[torch.dtype]:
    return row.dtypes if mode in (*PLAIN, *NAMED) else row.differentiable


def run_task(task: Task) -> Result:
    """Run a task in this process."""
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
    """Run the tasks from stdin, one in each line; print a line for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of torch is not a result
    for line in sys.stdin:
        signal.alarm(LIMIT)
        result = run_task(Task(**json.loads(line)))
        signal.alarm(0)
        print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)


class _Server:
    """A process that runs tasks, and is replaced when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, task: Task) -> Result | int:
        """Return the result of a task, or the reason why the process ended."""
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
    if answer > 0:  # an error of Python, which is a fault of the sweep itself
        return Result(*task.key, Verdict.FAIL.name, messages=[(Verdict.FAIL.name, "", how)])
    alone = server.ask(dataclasses.replace(task, plain=True))
    if isinstance(alone, Result):
        return Result(*task.key, Verdict.FAIL.name, messages=[(Verdict.FAIL.name, "", how)])
    said = f"torch alone: {how}"
    return Result(*task.key, Verdict.NONE.name, messages=[(Verdict.NONE.name, "", said)])


def read(path: Path) -> list[Result]:
    """Return the results in a file; the last result of each task."""
    if not path.exists():
        return []
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return list({result.key: result for result in results}.values())


def forget(path: Path, verdicts: Iterable[str]) -> None:
    """Remove the results with these verdicts from a file."""
    kept = [result for result in read(path) if result.verdict not in set(verdicts)]
    path.write_text("".join(json.dumps(dataclasses.asdict(result)) + "\n" for result in kept))


def run(tasks: Iterable[Task], path: Path, workers: int = 2) -> None:
    """Run the tasks without a result in the file, and append their results."""
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
    """Return a parser with the options of every sweep; ``file`` and ``most`` are the defaults."""
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
    """Return the contents of the file after the tasks that the options select."""
    if not options.report:
        if options.anew:
            forget(options.file, options.anew.split(","))
        wanted = (task for task in tasks if re.search(options.match, task.row))
        run(wanted, options.file, options.workers)
    return read(options.file)
