"""What loops cost: examples that need different numbers of steps, and many small steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import tsfunc
from benchmarks.timing import Case
from benchmarks.ways import OURS, SPECIALIZED

STEPS, EXAMPLES, WIDTH = 1000, 256, 1024


def each_its_own(x: Tensor, n: Tensor) -> Tensor:
    """So many steps as the example needs."""
    found: Tensor = tsfunc.fori_loop(0, n, lambda i, x: torch.sin(x) * 1.01, x)
    return found


def one_by_one(x: Tensor, counts: list[int]) -> Tensor:
    """The sum of the steps of all examples."""
    rows = []
    for row, count in zip(x, counts, strict=True):
        for _ in range(count):
            row = torch.sin(row) * 1.01
        rows.append(row)
    return torch.stack(rows)


def scanned(x: Tensor, xs: Tensor) -> Tensor:
    found: Tensor = tsfunc.scan(lambda c, row: (torch.tanh(c * 0.9 + row), None), x, xs)[0]
    return found


def unrolled(x: Tensor, xs: Tensor) -> Tensor:
    for row in xs:
        x = torch.tanh(x * 0.9 + row)
    return x


def cases() -> Iterator[Case]:
    counts = torch.logspace(0, 3, EXAMPLES).long()
    x = torch.randn(EXAMPLES, WIDTH)
    as_numbers = counts.tolist()
    yield Case(
        f"vmap of a loop of 1 to {STEPS} steps, geometric, {EXAMPLES} examples",
        {
            "each example by itself": lambda: one_by_one(x, as_numbers),
            OURS: lambda: tsfunc.vmap(each_its_own)(x, counts),
        },
        base="each example by itself",
        goals={OURS: 2.0},
    )
    start, xs = torch.randn(16), torch.randn(STEPS, 16)
    program = tsfunc.specialize(scanned)
    yield Case(
        f"scan of {STEPS} small steps",
        {
            "unrolled by hand": lambda: unrolled(start, xs),
            OURS: lambda: scanned(start, xs),
            SPECIALIZED: lambda: program(start, xs),
        },
        base="unrolled by hand",
        goals={SPECIALIZED: 1.2},
    )
