"""Counts of instructions, which other work on the machine does not change.

NOTE [counts of instructions]
``counts`` runs the benchmarks in another process under Valgrind's callgrind, with a fixed hash
seed, and without the garbage collector while it counts. Callgrind runs a process about fifty
times slower. It counts only between two calls of torch's ``_valgrind_toggle``, which
``torch.utils.benchmark`` uses too. Before the first of them, torch is imported and caches fill
without instrumentation, which takes a third of the time. The process writes down which benchmark
each count is for, and callgrind writes the counts.

A count is the least of several, for one call. The same code on the same machine gives counts within
about one percent. Counts from two releases of torch or Python, or from two kinds of processors,
can't be compared: torch chooses its kernels by the processor.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.timing import Call, Case

ROUNDS = 2
OPERATIONS = 4  # calls of one round, unless one call has more instructions
TOTALS = "totals: "


def available() -> bool:
    """True if the tools are installed, and torch is built for them."""
    tools = all(shutil.which(tool) for tool in ("valgrind", "callgrind_control"))
    return tools and torch._C._valgrind_supported_platform()


def counts(timeout: float = 1800) -> dict[str, dict[str, int]]:
    """Return the instructions of a call, by benchmark and variant.

    Raises:
        RuntimeError: the process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "callgrind"
        done = subprocess.run(
            [
                "valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no",
                "--cache-sim=no", f"--callgrind-out-file={output}",
                sys.executable, "-m", "benchmarks", "check", "--count", str(Path(folder) / "names"),
            ],
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"the benchmarks failed under valgrind:\n{done.stderr[-2000:]}")
        least: dict[str, dict[str, int]] = {}
        names = (Path(folder) / "names").read_text().splitlines()
        for number, line in enumerate(names, start=1):
            name, variant, operations = line.split("\t")
            count = _total(Path(f"{output}.{number}")) // int(operations)
            variants = least.setdefault(name, {})
            variants[variant] = min(count, variants.get(variant, count))
        return least


def _total(path: Path) -> int:
    """Return the count in a file of callgrind."""
    lines = path.read_text(errors="replace").splitlines()
    return next(int(line[len(TOTALS) :]) for line in lines if line.startswith(TOTALS))


def count(cases: Iterable[Case], names: Path) -> None:
    """Count each variant of each benchmark, except its base, and write down the order."""
    calls = list(_calls(cases))
    for case, _, call in calls:
        # The interpreter specializes its instructions during the first few calls of a function.
        for _ in range(3 if case.per > 1 else 12):
            call()
    control = ["callgrind_control", "-i", "on", str(os.getpid())]
    subprocess.run(control, check=True, stdout=subprocess.DEVNULL)
    lines = []
    gc.disable()
    for case, variant, call in calls:
        times = max(1, OPERATIONS // case.per)
        for _ in range(ROUNDS):
            gc.collect()
            torch._C._valgrind_toggle()
            for _ in range(times):
                call()
            torch._C._valgrind_toggle_and_dump_stats()
            lines.append(f"{case.name}\t{variant}\t{times * case.per}\n")
    names.write_text("".join(lines))


def _calls(cases: Iterable[Case]) -> Iterator[tuple[Case, str, Call]]:
    for case in cases:
        for variant, call in case.calls.items():
            if variant != case.base:
                yield case, variant, call
