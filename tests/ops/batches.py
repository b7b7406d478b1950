"""Batches of a case: which tensors are batched, where their batch dims are, and the loop."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tsfunc
from tests.ops.database import Case, Results
from tests.ops.harness import vary

SIZES = (3, 2)  # the sizes of the innermost and the next batch dim


@dataclass(frozen=True)
class Batch:
    """A case's tensors with batch dims, innermost level first.

    Attributes:
        inputs: the physical tensors.
        dims: for each level, where the dim lies in each input as that level's vmap gets it (all
            inner dims still there), or None.
        sizes: the size of each level's batch dim.
    """

    inputs: tuple[Tensor, ...]
    dims: tuple[tuple[int | None, ...], ...]
    sizes: tuple[int, ...]

    def fresh(self) -> list[Tensor]:
        """Return copies of the inputs, for calls that write."""
        return [clone(x) for x in self.inputs]

    def __str__(self) -> str:
        shapes = [tuple(x.shape) for x in self.inputs]
        return f"{shapes} in_dims {[list(d) for d in self.dims]}"


def clone(x: Tensor) -> Tensor:
    """Return a copy with the same memory layout."""
    return x.detach().clone()


def mapped(
    f: Callable[..., Results], batch: Batch, randomness: str = "error", **options: Any
) -> Any:
    """Return ``f`` under tsfunc's vmap, once for each level."""
    for dims in batch.dims:
        f = tsfunc.vmap(f, in_dims=dims, randomness=randomness, **options)
    return f


def looped(f: Callable[..., Results], batch: Batch, *, alias: bool = False) -> Any:
    """Return the results of ``f`` in a Python loop for each level, stacked.

    Each example has memory of its own; with ``alias`` it is a view of the inputs.
    """

    def own(*examples: Tensor) -> Results:
        return f(*[clone(x) for x in examples])

    looped = f if alias else own
    for dims, size in zip(batch.dims, batch.sizes, strict=True):
        looped = _loop(looped, dims, size)
    return looped


def _loop(f: Callable[..., Results], dims: Sequence[int | None], size: int) -> Any:
    def loop(*inputs: Tensor) -> Results:
        outs = [
            f(*[x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True)])
            for i in range(size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*outs, strict=True))

    return loop


def subsets(
    places: Sequence[int], always: Sequence[int] = (), limit: int = 3
) -> Iterator[tuple[int, ...]]:
    """Return choices of batched tensors: every choice of few; of many: all, each one, all but one.

    The first choice is all tensors. Each choice contains ``always``.
    """
    seen = set()
    count = len(places)
    if count <= limit:
        choices = [c for k in range(count, 0, -1) for c in itertools.combinations(places, k)]
    else:
        choices = [tuple(places)]
        for i in places:
            choices += [(i,), tuple(j for j in places if j != i)]
    for choice in choices:
        chosen = tuple(sorted({*choice, *always}))
        if chosen and chosen not in seen:
            seen.add(chosen)
            yield chosen


def physical(examples: Sequence[Tensor], bdim: int) -> Tensor:
    """Return the stacked examples, each laid out like the sample if the sample has no gaps."""
    first = examples[0]
    steps = first.stride()
    order = sorted(range(first.dim()), key=lambda d: (-steps[d], d))
    stacked = torch.stack([x.permute(order) for x in examples])
    back = [0] * (first.dim() + 1)
    for place, dim in enumerate(order):
        back[dim + 1] = place + 1
    inside = stacked.permute(back).movedim(0, bdim)
    if first.is_contiguous() and bdim:
        inside = inside.contiguous()
    return inside


def batch_of(
    case: Case,
    levels: Sequence[Sequence[int]],
    where: str,
    varied: bool,
    rng: random.Random,
    sizes: Sequence[int] = SIZES,
) -> Batch:
    """Return the batch of a case; ``levels`` has the batched positions for each level.

    ``where`` is the position of the batch dims: "first", "last", or "anywhere". Values are
    ``varied`` from example to example, except integers that the case keeps.
    """
    inputs = list(case.tensors)
    dims = []
    for level, (chosen, size) in enumerate(zip(levels, sizes, strict=False)):
        bdims: list[int | None] = [None] * len(inputs)
        for i in chosen:
            x = inputs[i]
            step = 5**level
            vary_it = varied and (not case.ordered or x.is_floating_point())
            examples = [vary(x, j * step) if vary_it else x for j in range(max(size, 1))]
            spot = {"first": 0, "last": x.dim()}.get(where, rng.randint(0, x.dim()))
            inputs[i] = physical(examples, spot).narrow(spot, 0, size)
            bdims[i] = spot - inputs[i].dim() if where == "last" else spot
        dims.append(tuple(bdims))
    return Batch(tuple(inputs), tuple(dims), tuple(sizes[: len(levels)]))


def choices_of(case: Case, levels: int, rng: random.Random) -> Iterator[list[tuple[int, ...]]]:
    """Yield the batched tensors of each level, for each way to batch a case; not sparse ones."""
    dense = [i for i, x in enumerate(case.tensors) if x.layout is torch.strided]
    inner = list(subsets(dense, case.written))
    if levels == 1:
        yield from ([one] for one in inner)
        return
    for one in inner:
        # All with all, and each choice with a random one.
        others = [rng.choice(inner), inner[0]] if one is inner[0] else [rng.choice(inner)]
        for outer in others:
            yield [one, outer]


def written_inputs(
    case: Case, batch: Batch, inputs: Sequence[Tensor], want: Results
) -> tuple[Results, Results]:
    """Return the written inputs and their expected values, with the batch dims first."""
    count = len(case.written)
    mine = []
    for i in case.written:
        x = inputs[i]
        for level, dims in enumerate(reversed(batch.dims)):
            bdim = dims[i]
            assert bdim is not None
            x = x.movedim(bdim + level if bdim >= 0 else bdim, level)
        mine.append(x)
    return tuple(mine), tuple(want[-count:])
