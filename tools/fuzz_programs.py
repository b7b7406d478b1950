"""Runs random programs under random towers of transforms, and compares with loops and autograd.

    python -m tools.fuzz_programs                          a minute, with a seed of its own
    python -m tools.fuzz_programs --seconds 900 --seed 7
    python -m tools.fuzz_programs --only 7/123             one program again
    python -m tools.fuzz_programs --keep build/fuzz        failures are kept there, as tests

The page ``docs/fuzzing.md`` says what is drawn, and what is not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tools.fuzz.draw import draw_function
from tools.fuzz.minimizing import minimized
from tools.fuzz.program import Program, source
from tools.fuzz.report import as_test, table
from tools.fuzz.running import REFUSED, SKIPPED, Verdict
from tools.fuzz.towers import draw_tower
from tools.fuzz.workers import Worker

_SHOWN = 3  # failures of each cause that are minimized


def drawn(seed: str, inductor: bool = False) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    return draw_tower(rng, draw_function(rng, seed), inductor)


def fuzz(seed: int, seconds: float, keep: Path | None, most: int, inductor: bool = False) -> int:
    """Run programs for so long; return the number of distinct failures."""
    verdicts: Counter[str] = Counter()
    constructs: Counter[str] = Counter()
    transforms: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    causes: dict[tuple[str, str], int] = {}
    end = time.monotonic() + seconds
    number = 0
    with Worker() as worker:
        while time.monotonic() < end and (not most or number < most):
            program = drawn(f"{seed}/{number}", inductor)
            number += 1
            verdict = worker.run(program)
            verdicts[verdict.kind] += 1
            if verdict.kind in (REFUSED, SKIPPED):
                reasons[f"{verdict.kind}: {verdict.cause}"] += 1
                continue
            constructs.update({name.rpartition("/")[2] for name in program.constructs})
            constructs["in bodies"] += any("/" in name for name in program.constructs)
            transforms.update({step.kind for step in program.tower})
            if not verdict.failed:
                continue
            key = (verdict.kind, verdict.cause)
            causes[key] = causes.get(key, 0) + 1
            if causes[key] <= _SHOWN:
                show(program, verdict, worker, keep, len(causes))
    print(f"seed {seed}: {number} programs; {dict(verdicts)}")
    print("constructs\n" + table(constructs))
    print("transforms\n" + table(transforms))
    if reasons:
        print("not compared\n" + table(reasons, 1))
    for (kind, cause), count in causes.items():
        print(f"failure, {count} times: {kind}, {cause}")
    return len(causes)


def show(
    program: Program, verdict: Verdict, worker: Worker, keep: Path | None, number: int
) -> None:
    """Minimize a failure and print it."""
    small = minimized(program, verdict, worker.run)
    last = worker.run(small)
    try:
        text = as_test(small, last)
    except Exception as error:  # the reference dies with it, for want of memory say
        text = f"# {error}\n{source(small)}"
    print(f"{'-' * 80}\n# {last.detail}\n{text}", flush=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        name = program.seed.replace("/", "_")
        (keep / f"test_{name}.py").write_text(f"# {last.kind}: {last.cause}\n{text}")
        (keep / f"test_{name}.txt").write_text(last.detail)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_programs")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--count", type=int, default=0, help="programs at most")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", help="the seed of one program, as a failure prints it")
    parser.add_argument("--inductor", action="store_true", help="compile programs, too")
    given = parser.parse_args()
    if given.only:
        program = drawn(given.only, given.inductor)
        print(source(program))
        with Worker() as worker:
            verdict = worker.run(program)
            print(f"{verdict.kind}: {verdict.cause}\n{verdict.detail}")
            if verdict.failed:
                show(program, verdict, worker, given.keep, 0)
        return int(verdict.failed)
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    return int(fuzz(seed, given.seconds, given.keep, given.count, given.inductor) > 0)


if __name__ == "__main__":
    sys.exit(main())
