"""What a call of a specialized function costs beside its body."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import tsfunc
from benchmarks.timing import Call, Case
from benchmarks.ways import SPECIALIZED

PLAIN = "plain"
COMPILED = "torch.compile, no code generation"


def small(x: Tensor) -> Tensor:
    return torch.sin(x)


def two_of_many(tensors: list[Tensor]) -> Tensor:
    return tensors[0] + tensors[1]


def cases() -> Iterator[Case]:
    x, many = torch.randn(12), [torch.randn(4) for _ in range(200)]
    calls: dict[str, Call] = {
        PLAIN: partial(small, x),
        SPECIALIZED: partial(tsfunc.specialize(small), x),
        COMPILED: partial(torch.compile(small, backend="eager"), x),
    }
    yield Case("call of one small operator", calls, base=PLAIN, goals={SPECIALIZED: 2.0})
    compiled = torch.compile(two_of_many, backend="eager")
    calls = {
        COMPILED: partial(compiled, many),
        SPECIALIZED: partial(tsfunc.specialize(two_of_many), many),
        PLAIN: partial(two_of_many, many),
    }
    yield Case(
        "call with 200 tensors, 2 of them used",
        calls,
        base=COMPILED,
        goals={SPECIALIZED: 1.0},
    )
