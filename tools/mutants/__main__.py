"""Draw random mutants and count those that the tests kill.

    python -m tools.mutants                        300 mutants, with a new seed
    python -m tools.mutants --seed 7               the mutants of a seed; continues an earlier run
    python -m tools.mutants --seed 7 --again       its survivors once more
    python -m tools.mutants --seed 7 --report      its result so far
    python -m tools.mutants --number 20 --files tsfunc/ops/views.py

The page ``docs/mutants.md`` describes the mutants and the tests that run.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tools.mutants.drawing import Mutant, Source, draw, found_again
from tools.mutants.forks import preload
from tools.mutants.killing import Verdict, judged
from tools.mutants.live import judge
from tools.mutants.recording import CoveringTest, recorded

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tsfunc/dispatch/*.py",
    "tsfunc/ops/*.py",
    "tsfunc/ops/catalogue/*.py",
    "tsfunc/program/guarding/*.py",
    "tsfunc/program/closure/*guard*.py",
    "tsfunc/types/check_context.py",
    "tsfunc/types/containers.py",
    "tsfunc/types/unions.py",
    "tsfunc/types/contract.py",
)
TESTS = (
    "tests/dispatch/test_*.py",
    "tests/types/test_*.py",
    "tests/ops/test_*.py",
    "tests/ops/catalogue/test_*.py",
    "tests/program/test_*guards.py",
    "tests/program/test_ca*.py",
    "tests/program/test_checks.py",
    "tests/program/test_layouts_of_calls.py",
    "tests/program/test_guarantees.py",
    "tests/program/test_read_*.py",
    "tests/program/test_retraces.py",
    "tests/program/test_s*.py",
    "tests/program/test_files_rules.py",
    "tests/program/test_tensor_classes.py",
    "tests/transforms/test_collectives.py",
    "tests/transforms/test_explain.py",
    "tests/transforms/test_randomness*.py",
    "tests/transforms/test_specialize*.py",
    "tests/transforms/test_split.py",
    "tests/transforms/test_vmap*.py",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, judge and report; return 0 if at least 90% were killed."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeats a sample")
    parser.add_argument("--number", type=int, default=300, help="how many mutants")
    parser.add_argument("--files", nargs="+", default=FILES, help="where they are drawn from")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="test files that may run")
    parser.add_argument("--marked", default="not slow", help="pytest's -m for them")
    parser.add_argument("--budget", type=float, default=60, help="CPU seconds a mutant")
    parser.add_argument("--keep", type=Path, default=Path("build/mutants"), help="for results")
    parser.add_argument("--stale", action="store_true", help="use records of changed sources")
    parser.add_argument("--again", action="store_true", help="judge the survivors once more")
    parser.add_argument("--report", action="store_true", help="report alone")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    results = options.keep / f"{seed}.jsonl"
    print(f"seed {seed} (repeat with --seed {seed}); results in {results}", flush=True)
    if not options.report:
        began = time.monotonic()
        preload()
        sources = [Source(ROOT / file, ROOT) for file in _expanded(options.files)]
        count = sum(len(source.changes) for source in sources)
        print(f"{count} changes in {len(sources)} files", flush=True)
        if options.again:
            drawn = list(_survivors(_read(results), sources))
        else:
            drawn = draw(sources, options.number, random.Random(seed))
        tests = list(_tests(options))
        print(f"{len(tests)} tests, recorded in {time.monotonic() - began:.0f} s", flush=True)
        _judge_all(drawn, tests, results, options)
        print(f"took {time.monotonic() - began:.0f} s")
    return report(results)


def _judge_all(
    drawn: Sequence[Mutant],
    tests: Sequence[CoveringTest],
    results: Path,
    options: argparse.Namespace,
) -> None:
    """Judge mutants in a live process; judge those that survive again with a new import."""
    known = {} if options.again else _read(results)
    mutants = [mutant for mutant in drawn if mutant.same not in known]
    # A copy, because forks print to another place.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as shown:
        if mutants:
            report = functools.partial(_write, results, shown)
            judge(mutants, tests, ROOT, options.budget, report)
        known = _read(results)
        for mutant in drawn:
            last = known[mutant.same]
            if not (last["killed"] or last["fresh"]):
                _write(results, shown, mutant, judged(mutant, tests, ROOT, options.budget))


def _expanded(patterns: Sequence[str]) -> list[str]:
    found = (sorted(glob.glob(pattern, root_dir=ROOT)) for pattern in patterns)
    return list(dict.fromkeys(name for names in found for name in names))


def _tests(options: argparse.Namespace) -> Iterator[CoveringTest]:
    mutated = _expanded(FILES)
    for file in _expanded(options.tests):
        folder = options.keep / "record"
        yield from recorded(file, mutated, ROOT, folder, options.marked, options.stale)


def _survivors(
    known: dict[tuple[str, ...], dict[str, Any]], sources: Sequence[Source]
) -> Iterator[Mutant]:
    by_file = {source.file: source for source in sources}
    for (file, function, before, after), result in known.items():
        if result["killed"] or file not in by_file:
            continue
        mutant = found_again(by_file[file], (file, function, before, after))
        if mutant is None:
            print(f"gone: {file} {function}: {before}", flush=True)
        else:
            yield mutant


def _read(results: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the last result of each mutant."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        result = json.loads(line)
        known[result["file"], result["function"], result["before"], result["after"]] = result
    return known


def _write(results: Path, shown: TextIO, mutant: Mutant, verdict: Verdict) -> None:
    result = {
        "file": mutant.file, "line": mutant.line, "function": mutant.function,
        "before": mutant.before, "after": mutant.after, **vars(verdict),
    }  # fmt: skip
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(result) + "\n")
    word = "killed" if verdict.killed else "SURVIVED"
    print(f"{word} {mutant.file}:{mutant.line} {verdict.seconds} s {verdict.by}", file=shown)


def report(results: Path) -> int:
    """Print the survivors and the share of killed mutants."""
    known = _read(results).values()
    killed = [result for result in known if result["killed"]]
    for result in known:
        if not result["killed"]:
            print(f"\n{result['file']}:{result['line']} in {result['function']}")
            print(f"  - {result['before']}\n  + {result['after']}")
            print(f"  {result['ran']} of {result['covering']} covering tests ran")
    share = len(killed) / max(len(known), 1)
    print(f"\n{len(killed)} of {len(known)} killed: {100 * share:.1f}%")
    return 0 if share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
