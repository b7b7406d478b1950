"""Costs of loops: examples that need different numbers of steps, and many small steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import tsfunc
from benchmarks.timing import Call, Case
from benchmarks.variants import OURS, SPECIALIZED

STEPS = 1000
ALONE = "each example by itself"
BY_HAND = "unrolled by hand"


def counted(x: Tensor, n: Tensor) -> Tensor:
    """Loop for the number of steps that the example needs."""
    return tsfunc.fori_loop(0, n, lambda i, x: torch.sin(x) * 1.01, x)


def conditional(x: Tensor, n: Tensor) -> Tensor:
    """The same loop with a condition that is evaluated before each step."""

    def step(carry: Any) -> Any:
        return carry[0] + 1, torch.sin(carry[1]) * 1.01

    return tsfunc.while_loop(lambda carry: carry[0] < n, step, (torch.tensor(0), x))[1]


def in_python(x: Tensor, n: Tensor) -> Tensor:
    """The same loop in plain Python."""
    i = torch.tensor(0)
    while i < n:
        i, x = i + 1, torch.sin(x) * 1.01
    return x


def one_by_one(x: Tensor, counts: list[int]) -> Tensor:
    """Return the sum of the steps of all examples, computed one by one."""
    rows = []
    for row, count in zip(x, counts, strict=True):
        for _ in range(count):
            row = torch.sin(row) * 1.01
        rows.append(row)
    return torch.stack(rows)


def each(f: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    return torch.stack([f(*row) for row in zip(*columns, strict=True)])


def slope(f: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return the gradient of the sum of a function's results."""
    return tsfunc.grad(lambda x, n: f(x, n).sum())


def of_many_examples(counts: Tensor, width: int) -> Iterator[Case]:
    x = torch.randn(len(counts), width)
    numbers = counts.tolist()
    programs = [tsfunc.specialize(tsfunc.vmap(f)) for f in (counted, conditional)]
    what = f"{len(counts)} examples of {width} numbers, 1 to {STEPS} steps"
    yield Case(
        f"vmap of fori_loop, {what}",
        {
            ALONE: lambda: one_by_one(x, numbers),
            OURS: lambda: tsfunc.vmap(counted)(x, counts),
            SPECIALIZED: lambda: programs[0](x, counts),
        },
        base=ALONE,
        goals={OURS: 2.0, SPECIALIZED: 2.0},
    )
    yield Case(
        f"vmap of while_loop, {what}",
        {
            ALONE: lambda: each(in_python, x, counts),
            OURS: lambda: tsfunc.vmap(conditional)(x, counts),
            SPECIALIZED: lambda: programs[1](x, counts),
            "tsfunc, of a plain while": lambda: tsfunc.vmap(in_python, data_dependent="split")(
                x, counts
            ),
        },
        base=ALONE,
        goals={OURS: 2.0, SPECIALIZED: 2.0},
    )


def of_gradients(counts: Tensor, width: int) -> Case:
    x = torch.randn(len(counts), width)
    total = slope(tsfunc.vmap(conditional))
    program = tsfunc.specialize(tsfunc.vmap(slope(conditional)))
    return Case(
        f"gradients of while_loop, {len(counts)} examples of {width} numbers, 1 to {STEPS} steps",
        {
            ALONE: lambda: each(slope(in_python), x, counts),
            "tsfunc, vmap of grad": lambda: tsfunc.vmap(slope(conditional))(x, counts),
            "tsfunc, grad of vmap": lambda: total(x, counts),
            "tsfunc, vmap of grad specialized": lambda: program(x, counts),
        },
        base=ALONE,
        goals={
            "tsfunc, vmap of grad": 2.0,
            "tsfunc, grad of vmap": 2.0,
            "tsfunc, vmap of grad specialized": 2.0,
        },
    )


def scanned(x: Tensor, xs: Tensor) -> Tensor:
    return tsfunc.scan(lambda c, row: (torch.tanh(c * 0.9 + row), None), x, xs)[0]


def unrolled(x: Tensor, xs: Tensor) -> Tensor:
    for row in xs:
        x = torch.tanh(x * 0.9 + row)
    return x


def scanned_slope(x: Tensor, xs: Tensor) -> Tensor:
    return tsfunc.grad(lambda x: scanned(x, xs).sum())(x)


def unrolled_slope(x: Tensor, xs: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(unrolled(x, xs).sum(), x)[0]


def of_steps(name: str, by_hand: Call, f: Callable[..., Any], *args: Tensor) -> Case:
    program = tsfunc.specialize(f)
    return Case(
        name,
        {BY_HAND: by_hand, OURS: lambda: f(*args), SPECIALIZED: lambda: program(*args)},
        base=BY_HAND,
        goals={SPECIALIZED: 1.2},
    )


def cases() -> Iterator[Case]:
    doubling = torch.tensor([2**k for k in range(10)] + [STEPS])
    yield from of_many_examples(doubling, 16)
    for examples, width in ((64, 16), (64, 4096), (256, 1024)):
        yield from of_many_examples(torch.logspace(0, 3, examples).long(), width)
    yield of_gradients(torch.logspace(0, 3, 64).long(), 16)
    x, xs = torch.randn(16), torch.randn(STEPS, 16)
    many, rows = torch.randn(8, 16), torch.randn(8, STEPS, 16)
    along = rows.transpose(0, 1)
    steps = f"{STEPS} small steps"
    yield of_steps(f"scan of {steps}", lambda: unrolled(x, xs), scanned, x, xs)
    yield of_steps(
        f"gradient of a scan of {steps}", lambda: unrolled_slope(x, xs), scanned_slope, x, xs
    )
    yield of_steps(
        f"vmap of a scan of {steps}", lambda: unrolled(many, along), tsfunc.vmap(scanned), many,
        rows,
    )  # fmt: skip
    yield of_steps(
        f"map of {steps}",
        lambda: torch.stack([torch.tanh(row * 0.9 + 1) for row in xs]),
        lambda xs: tsfunc.map(lambda row: torch.tanh(row * 0.9 + 1), xs),
        xs,
    )
