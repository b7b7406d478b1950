"""``python -m benchmarks``: every benchmark, or those whose names contain a word.

python -m benchmarks                       all, as a table
python -m benchmarks gradients             those with "gradients" in their names
python -m benchmarks --repeats 5           quicker, less exact
python -m benchmarks --without inductor    leave out variants with this in their names
python -m benchmarks --markdown            the table in the format of docs/benchmarks.md
python -m benchmarks check                 fail if something is slower than the stored baseline
python -m benchmarks scaling               how costs grow with sizes, with plots
python -m benchmarks goals                 costs before a first result: traces, imports, compilation
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from benchmarks import (
    check,
    cold,
    comparison,
    control_flow,
    eager,
    goals,
    gpu,
    gradients,
    mesh,
    models,
    operators,
    scaling,
    specializing,
    tracing,
    vmapping,
)
from benchmarks.cold import Cold
from benchmarks.timing import Case, Timing, settle_memory

COLUMNS = ("benchmark and variants", "time", "ratio", "aim")


def readable(seconds: float) -> str:
    """Return a number with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def rows_of(case: Case | Cold, timings: Mapping[str, Timing | str]) -> Iterator[list[str]]:
    """Return a row for each variant: name, time, ratio to the base, and the target ratio."""
    for variant, timing in timings.items():
        aim = f"{case.goals[variant]:g}" if variant in case.goals else ""
        if isinstance(timing, str):
            yield [f"{variant}: {timing}", "failed", "", aim]
        else:
            yield [variant, readable(timing.seconds), f"{timing.ratio:.2f}", aim]


def all_cases() -> Iterator[Case | Cold]:
    for topic in (
        vmapping,
        gradients,
        eager,
        operators,
        control_flow,
        specializing,
        tracing,
        comparison,
        models,
        mesh,
        gpu,
    ):
        yield from topic.cases()
    yield from cold.cases()


def without(words: Sequence[str], case: Case | Cold) -> Case | Cold:
    """Return a benchmark without the variants whose names contain one of the words."""
    if not words or isinstance(case, Cold):
        return case
    calls = {
        variant: call
        for variant, call in case.calls.items()
        if variant == case.base or not any(word in variant for word in words)
    }
    return dataclasses.replace(case, calls=calls)


def print_markdown(results: Sequence[tuple[str, list[list[str]]]]) -> None:
    print("|", " | ".join(COLUMNS), "|\n|---|--:|--:|--:|")
    for name, rows in results:
        print(f"| **{name}** | | | |")
        for row in rows:
            print("|", " | ".join(row), "|")


def print_table(results: Sequence[tuple[str, list[list[str]]]]) -> None:
    title = f"torch {torch.__version__}, Python {platform.python_version()}, one thread"
    table = Table(*COLUMNS, title=title, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, rows in results:
        table.add_row(f"[bold]{escape(name)}[/]")
        for variant, *figures in rows:
            table.add_row(f"  {escape(variant)}", *figures)
        table.add_section()
    Console().print(table)


# Commands with their own options.
COMMANDS = {"check": check.main, "goals": goals.main, "scaling": scaling.main}


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        return COMMANDS[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("word", nargs="?", default="", help="run what has this in its name")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--cpu", action="store_true", help="the least CPU times, for busy machines")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        help="leave out variants with this in their name",
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settle_memory()

    every = list(all_cases())
    chosen = [without(args.without, case) for case in every if args.word in case.name]
    if not chosen:
        names = "\n  ".join(case.name for case in every)
        parser.error(f"no benchmark has {args.word!r} in its name; there are:\n  {names}")
    results, failed = [], False
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        for case in progress.track(chosen, description="measuring"):
            cpu = {"cpu": args.cpu} if isinstance(case, Case) else {}
            timings = case.measure(args.repeats, **cpu)
            results.append((case.name, list(rows_of(case, timings))))
            failed |= any(isinstance(timing, str) for timing in timings.values())
    (print_markdown if args.markdown else print_table)(results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
