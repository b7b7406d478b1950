"""Cost of a call of a specialized function beside its body."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, List  # noqa: UP035

import torch
from torch import Tensor

import tsfunc
from benchmarks.timing import Call, Case
from benchmarks.variants import SPECIALIZED
from tsfunc.types import Contract, compile_descriptors, signature

ROWS = tsfunc.MetaTensorType(["n"], dtype=torch.float32)
PLAIN = "plain"
COMPILED = "torch.compile, no code generation"


def small(x: Tensor) -> Tensor:
    return torch.sin(x)


def two_of_many(tensors: list[Tensor]) -> Tensor:
    return tensors[0] + tensors[1]


def described(tensors: List[ROWS]) -> None:  # type: ignore[valid-type]  # noqa: UP006
    """A signature for any number of tensors of one length."""


def by_types(check: Callable[..., list[Any]], tensors: list[Tensor]) -> int:
    return len(check(tensors))


def by_descriptors(contract: Contract, tensors: list[Tensor]) -> int:
    return len(contract.check({"tensors": tensors}).sizes) - 1


def by_isinstance(tensors: list[Tensor]) -> int:
    return sum(not isinstance(tensor, Tensor) for tensor in tensors)


def checks(tensors: list[Tensor]) -> Case:
    """Cost of the check of arguments for each leaf, beside the guard; every check passes."""
    contract = compile_descriptors(
        {"tensors": List[ROWS]},  # noqa: UP006
        inspect.signature(described),
    )
    calls: dict[str, Call] = {
        "isinstance alone": partial(by_isinstance, tensors),
        "tsfunc, types of a signature": partial(by_types, signature(described).check, tensors),
        "tsfunc, descriptors": partial(by_descriptors, contract, tensors),
    }
    name = "check of one leaf of a call's arguments"
    return Case(name, calls, base="isinstance alone", per=len(tensors))


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
        goals={SPECIALIZED: 0.5},
    )
    yield checks(many)
