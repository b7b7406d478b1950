"""Ways to run a drawn program; a request to a worker names one."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import tsfunc
from tools.fuzz import reference, running
from tools.fuzz.program import Program
from tools.fuzz.running import BROKEN, OK, SKIPPED, WRONG, Verdict
from tools.fuzz.sessions import run_session

THREADS = 16
INTERRUPTS = 12
_NEVER = 0.0  # as a time of the timer
_INTERRUPTING = 60.0  # seconds, after which a slow program is not interrupted again
_SLOW = 1.0  # CPU seconds; a slower program is not repeated in threads


def run_threads(programs: tuple[Program, ...]) -> Verdict:
    """Run programs in threads at once: those that are right and fast alone must be right."""
    good: list[tuple[Program, list[Any]]] = []
    for drawn in programs:
        program = drawn.with_(circumstances=())  # some of the settings are shared by all threads
        begin = time.process_time()
        if running.run(program).kind == OK and time.process_time() - begin < _SLOW:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                good.append((program, running.results(program, reference)))
    if not good:
        return Verdict(SKIPPED, "no program is right and fast alone")
    verdicts: list[Verdict] = []
    whole = running.process_state()
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        start.wait()
        for k in range(3):
            program, expected = good[(number + k) % len(good)]
            verdict = running.compared(program, expected)
            if verdict.failed:
                verdicts.append(verdict)

    with warnings.catch_warnings():  # warning filters are shared by all threads
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not verdicts and (now := running.process_state()) != whole:
        return Verdict(BROKEN, "process state after threads", f"{whole} became {now}")
    return verdicts[0] if verdicts else Verdict(OK)


def run_interrupted(program: Program) -> Verdict:
    """Interrupt a program at random times; the thread must be whole, and the program right.

    The calls have no circumstances: an interrupt in a context manager of the caller's own, as they
    are, leaves what that context manager changed.
    """
    program = program.with_(circumstances=())
    verdict = running.run(program)
    if verdict.kind != OK:
        return Verdict(SKIPPED, "not right alone")
    whole = running.process_state()
    rng = random.Random(program.seed)
    begin = time.monotonic()
    _interrupted(program, _NEVER)
    took = time.monotonic() - begin
    met = 0
    old_hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    old = signal.signal(signal.SIGALRM, _interrupt)
    try:
        for _ in range(INTERRUPTS):
            if time.monotonic() - begin > _INTERRUPTING:
                break
            met += _interrupted(program, rng.random() * took + 1e-5)
            now = running.process_state()
            if now != whole:
                return Verdict(
                    BROKEN, "thread state after an interrupt", f"{whole} became {now}", met
                )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        sys.unraisablehook = old_hook
    after = running.run(program)
    if after.failed:
        return Verdict(WRONG, "after an interrupt", f"{after.kind}: {after.detail}", met)
    return Verdict(OK, interrupts=met)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupted(program: Program, after: float) -> bool:
    """Run a program; return True if the interrupt came before its end."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            signal.setitimer(signal.ITIMER_REAL, after)
            running.results(program, tsfunc)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, Exception):
        # torch turns an interrupt in a callback of C++ into its own error.
        signal.setitimer(signal.ITIMER_REAL, 0)
        return True
    return False


MODES: dict[str, Callable[[Any], Verdict]] = {
    "towers": running.run,
    "sessions": run_session,
    "threads": run_threads,
    "interrupts": run_interrupted,
}
