"""Sweeps the operator database in the modes of ``derivatives``.

for outcome in sweep(row, torch.float64, VMAP_GRAD): ...
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ops.database import Results, Row
from tests.ops.derivatives import differ
from tests.ops.sweep import (
    MEMORY,
    ONE_FOR_ALL,
    Mode,
    Outcome,
    is_drawn,
    shapes_differ,
    sweep_case,
)


def seeded(call: Callable[..., Results]) -> Callable[..., Results]:
    """Seed torch, so that every example draws the same numbers, as with ``randomness="same"``."""

    def drawing(*tensors: Any) -> Results:
        torch.manual_seed(0)
        return call(*tensors)

    return drawing


def sweep(row: Row, dtype: torch.dtype, mode: Mode, most: int | None = None) -> Iterator[Outcome]:
    """Sweep every differentiable case of a row.

    ``randomness="same"`` refuses draws from distributions that differ between examples; these cases
    use "different".
    """
    rng = random.Random(0)
    wheres = ("first",) if MEMORY.search(row.name) else ("first", "last", "anywhere")
    for case in row.cases(dtype, most, grad=True):
        if not case.differentiable:
            continue
        if not is_drawn(case):
            yield from sweep_case(mode, case, rng, wheres, differ)
            continue
        case = dataclasses.replace(case, call=seeded(case.call))
        refused = False
        for outcome in sweep_case(mode, case, rng, wheres, differ):
            if ONE_FOR_ALL in outcome.message:
                refused = True
            else:
                yield outcome
        for drawn in mode.drawn if refused else ():
            differs = tangents_differ if "jvp" in mode.name else differ
            yield from sweep_case(drawn, case, rng, wheres, differs)


def tangents_differ(got: Results, want: Results) -> str:
    """Return the differences in shapes and tangents; the values are random draws."""
    half = len(want) // 2
    return shapes_differ(got, want) or differ(got[half:], want[half:])
