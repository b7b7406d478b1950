"""Run random programs under random towers of transforms; compare them with loops and autograd.

    python -m tools.fuzz_programs                          a minute, with a new seed
    python -m tools.fuzz_programs --seconds 900 --seed 7
    python -m tools.fuzz_programs --mode sessions          one mode only
    python -m tools.fuzz_programs --only 7/123             one program again
    python -m tools.fuzz_programs --keep build/fuzz        keep failures there, as tests

The page ``docs/fuzzing.md`` describes the programs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.fuzz.draw import draw_function
from tools.fuzz.minimizing import minimized
from tools.fuzz.modes import MODES
from tools.fuzz.program import Program
from tools.fuzz.report import as_module, as_test, table
from tools.fuzz.running import FAILURES, HANGS, REFUSED, SKIPPED, Verdict
from tools.fuzz.sessions import Session, as_program, draw_session, minimized_session
from tools.fuzz.towers import draw_tower
from tools.fuzz.work import TooMuchWorkError
from tools.fuzz.workers import Worker

_SHOWN = 3  # failures of each cause that are minimized


# The number of draws in a row for each mode.
_MODES = ("towers", "sessions", "towers", "towers", "towers") * 5
_ROUND = (*_MODES[:-2], "interrupts", "threads")
_AT_ONCE = 4  # programs that threads share


def drawn(seed: str, inductor: bool = False) -> Any:
    """Return the program of a seed; the seed's last part may name a mode: "7/123/sessions"."""
    rng = random.Random(seed)
    mode = mode_of(seed)
    if mode == "sessions":
        return draw_session(rng, seed)
    if mode == "threads":
        return tuple(drawn(f"{seed}/{i}/towers", inductor) for i in range(_AT_ONCE))
    return draw_tower(rng, draw_function(rng, seed), inductor)


def mode_of(seed: str) -> str:
    """Return the mode of a seed's draw."""
    last = seed.rpartition("/")[2]
    return last if last in MODES else "towers"


def fuzz(
    seed: int,
    seconds: float,
    keep: Path | None,
    most: int,
    mode: str = "",
    inductor: bool = False,
    tolerated: Sequence[str] = (),
) -> int:
    """Run random programs for some seconds; return the number of distinct failures.

    Args:
        tolerated: kinds of failures that are printed and not counted.
    """
    verdicts: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    constructs: Counter[str] = Counter()
    transforms: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    causes: Counter[tuple[str, str]] = Counter()
    end = time.monotonic() + seconds
    number = interrupts = 0
    with Worker() as worker:
        while time.monotonic() < end and (not most or number < most):
            chosen = mode or _ROUND[number % len(_ROUND)]
            name = f"{seed}/{number}" + ("" if chosen == "towers" else f"/{chosen}")
            one, verdict = run_drawn(name, inductor, worker)
            number += 1
            verdicts[verdict.kind] += 1
            interrupts += verdict.interrupts
            modes[chosen] += 1
            if verdict.kind in (REFUSED, SKIPPED):
                reasons[f"{verdict.kind}: {verdict.cause}"] += 1
                continue
            if isinstance(one, Program):
                constructs.update({name.rpartition("/")[2] for name in one.constructs})
                constructs["in bodies"] += any("/" in name for name in one.constructs)
                transforms.update({step.kind for step in one.tower})
            elif isinstance(one, Session):
                constructs.update(f"outside: {name}" for name in one.readings)
            if verdict.failed:
                key = (verdict.kind, verdict.cause)
                causes[key] += 1
                if causes[key] <= _SHOWN:
                    show(name, one, verdict, worker, keep)
    print(f"seed {seed}: {number} draws; {dict(modes)}; {dict(verdicts)}; {interrupts} interrupts")
    print("constructs\n" + table(constructs))
    print("transforms\n" + table(transforms))
    if reasons:
        print("not compared\n" + table(reasons, 1))
    for (kind, cause), count in causes.items():
        print(f"failure, {count} times: {kind}, {cause}")
    return sum(kind not in tolerated for kind, _ in causes)


def run_drawn(name: str, inductor: bool, worker: Worker) -> tuple[Any, Verdict]:
    """Draw the program of a seed and run it; a program with too much work is not run."""
    try:
        one = drawn(name, inductor)
    except TooMuchWorkError as error:
        return None, Verdict(SKIPPED, str(error))
    return one, worker.run(one, mode_of(name))


def show(seed: str, one: Any, verdict: Verdict, worker: Worker, keep: Path | None) -> None:
    """Minimize a failure and print it."""
    mode = mode_of(seed)
    text, last = _minimized_text(mode, one, verdict, worker)
    print(f"{'-' * 80}\n# --only {seed}\n# {last.detail}\n{text}", flush=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        name = seed.replace("/", "_")
        (keep / f"test_{name}.py").write_text(f"# {last.kind}: {last.cause}\n{text}")
        (keep / f"test_{name}.txt").write_text(last.detail)


def _minimized_text(mode: str, one: Any, verdict: Verdict, worker: Worker) -> tuple[str, Verdict]:
    hangs = verdict.kind == HANGS  # each run of a smaller program might take the time limit
    if isinstance(one, Session):
        if hangs:
            return as_program(one, verdict), verdict
        session = minimized_session(one, verdict, lambda s: worker.run(s, mode))
        return as_program(session, verdict), worker.run(session, mode)
    if not isinstance(one, Program) or mode != "towers" or hangs:
        # In other modes a failure depends on chance, and may not repeat.
        programs = one if isinstance(one, tuple) else (one,)
        return f"# in mode {mode}\n{as_module(*programs)}", verdict
    small = minimized(one, verdict, worker.run)
    last = worker.run(small)
    try:
        return as_test(small, last), last
    except Exception as error:  # the reference dies too, for lack of memory for example
        return f"# {error}\n{as_module(small)}", last


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_programs")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--count", type=int, default=0, help="programs at most")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", help="the seed of one program, as a failure prints it")
    parser.add_argument("--mode", choices=list(MODES), default="", help="by default all")
    parser.add_argument("--inductor", action="store_true", help="compile programs, too")
    parser.add_argument("--tolerate", action="append", default=[], choices=FAILURES, metavar="KIND",
                        help="a kind of failure that leaves the exit status 0: "
                        + ", ".join(FAILURES))  # fmt: skip
    given = parser.parse_args()
    if given.only:
        with Worker() as worker:
            one, verdict = run_drawn(given.only, given.inductor, worker)
            print(f"{verdict.kind}: {verdict.cause}\n{verdict.detail}")
            if verdict.failed:
                show(given.only, one, verdict, worker, given.keep)
        return int(verdict.failed)
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    failures = fuzz(
        seed, given.seconds, given.keep, given.count, given.mode, given.inductor, given.tolerate
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
