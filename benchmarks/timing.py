"""Paired timing: several variants of one task, checked to agree, then timed in turns.

The load of the machine drifts over seconds, so absolute figures of two runs can't be compared. Here
every repeat times each variant once, in blocks of a few milliseconds, every other repeat in the
opposite order; a ratio is the median of the repeats' own ratios.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds for one operation, and the ratio to the base: medians over the repeats."""

    seconds: float
    ratio: float


@dataclass(frozen=True)
class Case:
    """One task with several variants.

    Attributes:
        name: the task.
        calls: the variants, by name; they return the same.
        base: the variant that ratios refer to.
        goals: the target ratios.
        per: the number of operations in one call; times are for one operation.
    """

    name: str
    calls: Mapping[str, Call]
    base: str = "torch.func"
    goals: Mapping[str, float] = field(default_factory=dict)
    per: int = 1

    def failures(self) -> dict[str, str]:
        """Return the variants that raise or disagree with the base, with the reason."""
        expected = self.calls[self.base]()
        found = {}
        for name, call in self.calls.items():
            try:
                torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-5)
            except Exception as e:
                found[name] = f"{type(e).__name__}: {e}".splitlines()[0]
        return found

    def measure(
        self, repeats: int, block_seconds: float = 0.01, cpu: bool = False
    ) -> dict[str, Timing | str]:
        """Time each correct variant, and report the others.

        With ``cpu``, the figures are the least CPU times of the process instead of medians of wall
        times. Other work on the machine disturbs these less.
        """
        failures = self.failures()
        calls = {name: call for name, call in self.calls.items() if name not in failures}
        figures = least if cpu else medians
        return {**figures(self.in_turns(calls, repeats, block_seconds, cpu), self.base), **failures}

    def in_turns(
        self,
        calls: Mapping[str, Call],
        repeats: int,
        block_seconds: float = 0.01,
        cpu: bool = False,
    ) -> dict[str, list[float]]:
        """Return the seconds of one operation of each call, in each repeat.

        The garbage collector is left on, as it is for users.
        """
        counts = {name: calls_per_block(call, block_seconds) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        for repeat in range(repeats):
            for name in calls if repeat % 2 == 0 else reversed(calls):
                seconds[name].append(block(calls[name], counts[name], cpu) / self.per)
        return seconds


def settle_memory() -> None:
    """Let the C library keep freed tensors of up to 32 MB, as it does in a long-lived process.

    Until a block of a size is freed once, each new one is mapped afresh, and its first use costs
    more than the arithmetic; which sizes are affected depends on all earlier calls.
    """
    torch.zeros(32 * 2**20 - 2**12, dtype=torch.uint8)


def block(call: Call, count: int, cpu: bool = False) -> float:
    """Return the seconds of a call, over ``count`` calls."""
    clock = time.process_time if cpu else time.perf_counter
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def calls_per_block(call: Call, block_seconds: float) -> int:
    """Return the number of calls that fill a block, after two calls that warm up."""
    block(call, 2)
    return max(1, round(block_seconds / block(call, 3)))


def medians(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, Timing]:
    """Return medians over repeats in which every variant is timed once."""
    return {
        name: Timing(
            statistics.median(times),
            statistics.median(t / b for t, b in zip(times, seconds[base], strict=True)),
        )
        for name, times in seconds.items()
    }


def least(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, Timing]:
    """Return the least times, and their ratios."""
    return {
        name: Timing(min(times), min(times) / min(seconds[base])) for name, times in seconds.items()
    }
