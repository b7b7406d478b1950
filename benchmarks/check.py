"""``python -m benchmarks check``: fail if a benchmark is slower than its stored baseline.

The figures are counts of instructions if Valgrind is installed (NOTE [counts of instructions] in
``instructions.py``). Otherwise they are ratios to the base of a benchmark, mostly torch.func: the
medians of ratios of CPU times measured in turns. ``baseline.json`` has both. A figure over its
limit is measured twice more, and the least one counts, since other work only adds time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tsfunc
from benchmarks import eager, gradients, instructions, operators, specializing, tracing, vmapping
from benchmarks.timing import Case, medians, settle_memory
from benchmarks.variants import OURS, SPECIALIZED
from tsfunc.bridge import compiled

BASELINE = Path(__file__).with_name("baseline.json")
INSTRUCTIONS, TIMES = "instructions", "ratios of times"
LIMITS = {INSTRUCTIONS: 1.1, TIMES: 1.25}  # the largest ratio to the baseline that passes
REPEATS = 15
TRACED = 12 * tracing.IN_A_ROUND  # operators of the traces

# The checked benchmarks of other files. Each takes milliseconds at most.
CHECKED = frozenset({
    "vmap call of the identity",
    "vmap of 50 small elementwise operators",
    "vmap of a Laplacian, 64 points of 8 dims",
    "per-example gradients of an MLP, batch 64",
    "grad call of a tiny function",
    "one operator in vmap, by the function handler",
    "one operator in vmap, by the dispatch handler",
    "one call of a layer's in vmap",
    "one operator in vmap of grad, with its backward",
    "eager: hessian of a function of 8 numbers",
    "eager: NTK of a small MLP",
    "eager: gradients through a captured pullback",
    "eager: per-example gradients of two transformer blocks",
})  # fmt: skip

Figures = dict[str, dict[str, float]]


def cases() -> Iterator[Case]:
    """Yield the checked benchmarks, with their bases and the variants of this package."""
    for topic in (vmapping, gradients, operators, eager):
        for case in topic.cases():
            if case.name in CHECKED:
                variants = (case.base, OURS, SPECIALIZED)
                calls = {
                    variant: case.calls[variant] for variant in variants if variant in case.calls
                }
                yield dataclasses.replace(case, calls=calls)
    x = torch.randn(12)
    yield Case(
        "call of one small operator",
        {
            specializing.PLAIN: partial(specializing.small, x),
            SPECIALIZED: partial(tsfunc.specialize(specializing.small), x),
        },
        base=specializing.PLAIN,
    )
    yield specializing.checks([torch.randn(4) for _ in range(200)])
    for named in (False, True):
        sizes = "a named dim" if named else "static sizes"
        name = f"trace of {TRACED} operators with {sizes}, for one"
        yield Case(name, tracing.variants(TRACED, named), base=tracing.MAKE_FX, per=TRACED)


def environment(kind: str) -> dict[str, str]:
    """Return the properties of this machine that figures of a kind depend on."""
    python = platform.python_version()
    if kind == TIMES:
        return {"torch": torch.__version__, "Python": python.rpartition(".")[0]}
    return {
        "torch": torch.__version__,
        "Python": python,
        "machine": platform.machine(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def handlers() -> str:
    """Return the handlers that this process uses; each kind has its own baseline."""
    return "Python handlers" if compiled.load() is None else "compiled handlers"


def measured(kind: str, only: Iterable[str] | None = None) -> Figures:
    """Return the figures by benchmark and variant, for all benchmarks or some names."""
    if kind == INSTRUCTIONS:
        return {name: dict(variants) for name, variants in instructions.counts().items()}
    figures: Figures = {}
    for case in cases():
        if only is None or case.name in only:
            failures = case.failures()
            if failures:
                raise RuntimeError(f"{case.name}: {failures}")
            seconds = case.in_turns(case.calls, REPEATS, cpu=True)
            timings = medians(seconds, case.base)
            figures[case.name] = {
                variant: round(t.ratio, 4) for variant, t in timings.items() if variant != case.base
            }
    return figures


def slower(figures: Figures, baseline: Figures, limit: float) -> list[tuple[str, str]]:
    """Return the benchmarks and variants whose figures are over the limit."""
    return [
        (name, variant)
        for name, variants in figures.items()
        for variant, figure in variants.items()
        if figure > limit * baseline.get(name, {}).get(variant, figure)
    ]


def least(one: Figures, other: Figures) -> Figures:
    """Return the lesser of two measurements; the second may cover fewer benchmarks."""
    return {
        name: {
            variant: min(figure, other.get(name, figures)[variant])
            for variant, figure in figures.items()
        }
        for name, figures in one.items()
    }


def compare(kind: str, baseline: Figures) -> bool:
    """Measure, print a table, and return True if everything is within the limit."""
    figures = measured(kind)
    for _ in range(2 if kind == TIMES else 0):
        again = {name for name, _ in slower(figures, baseline, LIMITS[kind])}
        if again:
            figures = least(figures, measured(kind, again))
    failed = slower(figures, baseline, LIMITS[kind])
    Console().print(table(kind, figures, baseline, failed))
    gone = sorted(baseline.keys() - figures.keys())
    if gone:
        print(f"In the baseline alone: {', '.join(gone)}. Renew it: make bench-baseline")
    if failed:
        print(f"Over {LIMITS[kind]:.2f} times the baseline: {len(failed)} of the figures above.")
    return not failed and not gone


def table(
    kind: str, figures: Figures, baseline: Figures, failed: Iterable[tuple[str, str]]
) -> Table:
    """Return the figures beside the baseline's, with failures in red."""
    title = f"{kind}, {handlers()}, torch {torch.__version__}"
    made = Table(
        "benchmark and variant", "baseline", "now", "change", title=title, box=box.SIMPLE_HEAD
    )
    for column in made.columns[1:]:
        column.justify, column.no_wrap = "right", True
    number = "{:,.0f}" if kind == INSTRUCTIONS else "{:.2f}"
    for name, variants in figures.items():
        for variant, figure in variants.items():
            before = baseline.get(name, {}).get(variant)
            change = "new" if before is None else f"{100 * (figure / before - 1):+.0f}%"
            style = "red" if (name, variant) in failed else ""
            shown = "" if before is None else number.format(before)
            label = escape(f"{name}: {variant}")
            made.add_row(label, shown, number.format(figure), change, style=style)
    return made


def renew() -> None:
    """Measure and store the baselines of the handlers in use."""
    stored = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    for kind in (INSTRUCTIONS, TIMES):
        if kind == INSTRUCTIONS and not instructions.available():
            print("Valgrind is not installed; the counts of instructions stay as they are.")
            continue
        entry = {"environment": environment(kind), "figures": measured(kind)}
        stored.setdefault(kind, {})[handlers()] = entry
    BASELINE.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"{BASELINE.name}: renewed for {handlers()}.")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks check")
    parser.add_argument("--renew", action="store_true", help="store a new baseline")
    parser.add_argument("--times", action="store_true", help="compare times, not instructions")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)  # inside of valgrind
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settle_memory()
    torch.manual_seed(0)
    if args.count is not None:
        instructions.count(cases(), args.count)
        os._exit(0)  # the end of an interpreter takes half a minute under valgrind
    if args.renew:
        renew()
        return 0
    stored: Mapping[str, Mapping[str, dict[str, Any]]] = json.loads(BASELINE.read_text())
    kinds = [TIMES] if args.times or not instructions.available() else [INSTRUCTIONS, TIMES]
    for kind in kinds:
        entry = stored.get(kind, {}).get(handlers())
        here = environment(kind)
        if entry is not None and entry["environment"] == here:
            return int(not compare(kind, entry["figures"]))
        what = "none" if entry is None else entry["environment"]
        print(f"The baseline of {kind} ({handlers()}) is for {what}, and this is {here}.")
    print(
        "There is nothing to compare with. Store a baseline at the commit to compare with "
        "(make bench-baseline), and check the other commit."
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
