"""Sweeps the operator database in the modes of ``derivatives``.

for outcome in sweep(row, torch.float64, VMAP_GRAD): ...
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ops.database import Case, Results, Row
from tests.ops.derivatives import differ
from tests.ops.sweep import MEMORY, Mode, Outcome, is_drawn, sweep_case


def seeded(call: Callable[..., Results]) -> Callable[..., Results]:
    """Every example draws the same numbers, in the loop as with ``randomness="same"``."""

    def drawing(*tensors: Any) -> Results:
        torch.manual_seed(0)
        return call(*tensors)

    return drawing


def sweep(row: Row, dtype: torch.dtype, mode: Mode, most: int | None = None) -> Iterator[Outcome]:
    """Every case of a row that has a derivative."""
    rng = random.Random(0)
    wheres = ("first",) if MEMORY.search(row.name) else ("first", "last", "anywhere")
    for case in row.cases(dtype, most, grad=True):
        if case.differentiable:
            yield from sweep_case(mode, _repeatable(case), rng, wheres, differ)


def _repeatable(case: Case) -> Case:
    return dataclasses.replace(case, call=seeded(case.call)) if is_drawn(case) else case
