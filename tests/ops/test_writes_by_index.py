"""Writes by index under vmap are the loop: shapes, batch dims and batched arguments are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import vmap

EXAMPLES = 3
INDEX, MASK = "index", "mask"
# Functions of a matrix, with the kind or the shape of each other argument.
Write = tuple[Callable[..., Tensor], Sequence[Any]]
ROWS, COLUMNS = 4, 5
WRITES: dict[str, Write] = {
    "scatter": (lambda x, i, v: x.scatter(0, i, v), [(INDEX, ROWS, (2, 3)), (2, 3)]),
    "scatter of a number": (lambda x, i: x.scatter(0, i, 2.5), [(INDEX, ROWS, (2, 3))]),
    "scatter_ of a number": (
        lambda x, i: x.clone().scatter_(-1, i, 2.5), [(INDEX, COLUMNS, (4, 2))],
    ),
    "scatter of a number, reduced": (
        lambda x, i: x.scatter(1, i, 2.5, reduce="multiply"), [(INDEX, COLUMNS, (4, 2))],
    ),
    "scatter_add": (lambda x, i, v: x.scatter_add(1, i, v), [(INDEX, COLUMNS, (4, 3)), (4, 3)]),
    "scatter_reduce": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "amax", include_self=False),
        [(INDEX, ROWS, (2, 3)), (2, 3)],
    ),
    "index_add": (
        lambda x, i, v: x.index_add(1, i, v, alpha=2.5), [(INDEX, COLUMNS, (6,)), (4, 6)],
    ),
    "index_copy": (lambda x, i, v: x.index_copy(-1, i, v), [(INDEX, COLUMNS, (1,)), (4, 1)]),
    "index_reduce": (
        lambda x, i, v: x.index_reduce(0, i, v, "mean", include_self=False),
        [(INDEX, ROWS, (6,)), (6, 5)],
    ),
    "index_fill": (lambda x, i, v: x.index_fill(0, i, v), [(INDEX, ROWS, (2,)), ()]),
    "index_fill_ of a number": (
        lambda x, i: x.clone().index_fill_(-1, i, 2.5), [(INDEX, COLUMNS, (2,))],
    ),
    "put": (lambda x, i, v: x.put(i, v, True), [(INDEX, ROWS * COLUMNS, (6,)), (6,)]),
    "masked_scatter": (lambda x, m, v: x.masked_scatter(m, v), [(MASK, (4, 5)), (20,)]),
    "masked_scatter, broadcast": (lambda x, m, v: x.masked_scatter(m, v), [(MASK, (5,)), (4, 5)]),
    "masked_fill_": (lambda x, m, v: x.clone().masked_fill_(m, v), [(MASK, (4, 1)), ()]),
    "masked_fill_ of a number": (lambda x, m: x.clone().masked_fill_(m, 2.5), [(MASK, (5,))]),
    "index_put of a mask": (lambda x, m, v: x.index_put((m,), v), [(MASK, (4,)), ()]),
    "index_put, accumulated": (
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
        [(INDEX, ROWS, (2, 1)), (INDEX, COLUMNS, (3,)), (2, 3)],
    ),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 0), [(INDEX, ROWS, (2, 5))]),
}  # fmt: skip


def drawn_argument(kind: Any, lead: tuple[int, ...]) -> tuple[Tensor, int]:
    """Return an argument and the rank of one example of it."""
    if kind[:1] == (INDEX,):
        _, high, shape = kind
        return torch.randint(high, (*lead, *shape)), len(shape)
    if kind[:1] == (MASK,):
        return torch.rand(*lead, *kind[1]) > 0.4, len(kind[1])
    return torch.randn(*lead, *kind, dtype=torch.float64), len(kind)


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", WRITES)
def test_a_write_by_index_is_the_loop(name: str, number: int) -> None:
    draw = random.Random(torch.initial_seed() + number)
    write, kinds = WRITES[name]
    args, in_dims = [], []
    for place, kind in enumerate([(ROWS, COLUMNS), *kinds]):
        batched = place == number % (len(kinds) + 1) or draw.random() < 0.6
        x, rank = drawn_argument(kind, (EXAMPLES,) if batched else ())
        bdim = draw.randint(0, rank) if batched else None
        args.append(x if bdim is None else x.movedim(0, bdim))
        in_dims.append(bdim)
    examples = [
        [x if bdim is None else x.select(bdim, i) for x, bdim in zip(args, in_dims, strict=True)]
        for i in range(EXAMPLES)
    ]
    expected = torch.stack([write(*example) for example in examples])
    torch.testing.assert_close(vmap(write, tuple(in_dims))(*args), expected)
