"""Laws of random numbers by example, on random programs: an example draws as it would alone."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import tsfunc
from tests.transforms.support import same
from tsfunc import specialize, vmap

drawing = functools.partial(vmap, randomness="split")

Func = Callable[[Tensor], Tensor]
SEED = int(os.environ.get("DRAW_LAWS_SEED", random.SystemRandom().randrange(1 << 30)))


def _drawn_function(choose: random.Random, depth: int) -> tuple[Func, str]:
    """Return a function of one number that draws random numbers, and its text."""
    kinds = ["rand", "dropout", "normal", "cosine"]
    if depth:
        kinds += ["cond", "switch", "while", "fori", "scan", "vmap", "checkpoint"] * 2
    kind = choose.choice(kinds)
    if kind == "rand":
        return (lambda x: x + torch.rand(())), "rand"
    if kind == "dropout":
        return (lambda x: x + nnf.dropout(torch.ones(3), 0.5).sum()), "dropout"
    if kind == "normal":
        return (lambda x: x + 2 * torch.randn(2).sum()), "normal"
    if kind == "cosine":
        return torch.cos, "cosine"
    parts = [_drawn_sequence(choose, depth - 1) for _ in range(2)]
    (one, text), (other, other_text) = parts
    by_draw = choose.random() < 0.5
    name = f"{kind}{'!' if by_draw else ''}"

    def coin(x: Tensor) -> Tensor:
        return torch.rand(()) if by_draw else x.sin().abs()

    if kind == "cond":
        return (
            lambda x: tsfunc.cond(coin(x) < 0.5, one, other, x)
        ), f"{name}({text}, {other_text})"
    if kind == "switch":

        def switched(x: Tensor) -> Tensor:
            index = (coin(x) * 3).long()
            return tsfunc.switch(index, [one, other, torch.sin], x)

        return switched, f"{name}({text}, {other_text})"
    if kind == "while":

        def looped(x: Tensor) -> Tensor:
            last = tsfunc.while_loop(
                lambda c: (coin(c[0]) < 0.6) & (c[1] < 3),
                lambda c: (one(c[0]), c[1] + 1),
                (x, torch.zeros((), dtype=torch.int64)),
            )
            return last[0]

        return looped, f"{name}({text})"
    if kind == "fori":
        return (
            lambda x: tsfunc.fori_loop(0, (coin(x) * 3).long(), lambda i, c: one(c), x)
        ), f"{name}({text})"
    if kind == "scan":

        def scanned(x: Tensor) -> Tensor:
            last, ys = tsfunc.scan(lambda c, _: (one(c), coin(c)), x, None, length=2)
            return last + ys.sum()

        return scanned, f"{name}({text})"
    if kind == "checkpoint":
        return tsfunc.checkpoint(one), f"checkpoint({text})"
    inner = choose.choice(["split", "same", "different"])
    return (
        lambda x: vmap(lambda y: one(x + y), randomness=inner)(torch.arange(2.0)).sum()
    ), f"vmap[{inner}]({text})"


def _drawn_sequence(choose: random.Random, depth: int) -> tuple[Func, str]:
    functions = [_drawn_function(choose, depth) for _ in range(choose.randint(1, 2))]

    def run(x: Tensor) -> Tensor:
        for function, _ in functions:
            x = function(x)
        return x

    return run, "; ".join(text for _, text in functions)


def _function(number: int, depth: int = 2) -> Func:
    choose = random.Random(SEED * 1000 + number)
    run, text = _drawn_sequence(choose, depth)
    print(f"DRAW_LAWS_SEED={SEED}, {number}: {text}")

    def func(x: Tensor) -> Tensor:
        return torch.stack([run(x), torch.rand(())])

    return func


def _from_seed(func: Callable[[Tensor], Any], x: Tensor) -> Any:
    torch.manual_seed(7)
    return func(x)


X = torch.linspace(-2.0, 3.0, 5, dtype=torch.float64)


@pytest.mark.parametrize("number", range(6))
def test_examples_of_drawn_functions_draw_as_alone(number: int) -> None:
    """This holds in chunks, in a part of the batch, and in programs."""
    func = _function(number)
    whole = _from_seed(drawing(func), X)
    same(_from_seed(drawing(func, chunk_size=1), X), whole)
    same(_from_seed(drawing(func), X[:2]), whole[:2])
    same(_from_seed(drawing(specialize(func)), X), whole)
    program = specialize(drawing(func))
    same(_from_seed(program, X), whole)
    same(_from_seed(program, X), whole)


@pytest.mark.parametrize("number", range(6, 9))
def test_derivatives_of_random_functions_draw_the_same_numbers(number: int) -> None:
    func = _function(number, 1)
    slope = tsfunc.grad(lambda x: func(x)[0])
    whole = _from_seed(drawing(slope), X)
    same(_from_seed(drawing(slope, chunk_size=2), X), whole)
    same(_from_seed(drawing(specialize(slope)), X), whole)
    same(_from_seed(specialize(drawing(slope)), X), whole)
    kept = tsfunc.grad(lambda x: torch_checkpoint(func, x, use_reentrant=False)[0])
    same(_from_seed(drawing(kept), X), whole)


@pytest.mark.parametrize("number", range(9, 11))
def test_examples_of_two_vmaps_draw_as_alone(number: int) -> None:
    func = _function(number, 1)
    x = torch.stack([X, X.cos()])
    whole = _from_seed(drawing(drawing(func)), x)
    for outer, inner in ((1, None), (None, 2), (1, 1)):
        chunked = drawing(drawing(func, chunk_size=inner), chunk_size=outer)
        same(_from_seed(chunked, x), whole)
    same(_from_seed(specialize(drawing(drawing(func))), x), whole)
    same(_from_seed(drawing(specialize(drawing(func))), x), whole)
