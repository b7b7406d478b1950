"""Sweeps the database: batches a case in many ways and holds a transform to the plain loop.

    for outcome in sweep(row, torch.float32, VMAP): ...

A ``Mode`` says what is compared: what tsfunc's transforms give for a batch, and what a Python loop
with nothing of ours in it gives. Other modes are made from ``mapped`` and ``looped``: for
vmap(grad), ``mapped(ours_grad(f), batch)`` and ``looped(torch_grad(f), batch)``.
"""

from __future__ import annotations

import enum
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tsfunc
from tests.ops.database import Case, Results, Row
from tests.ops.harness import vary
from tsfunc.bridge import fallback
from tsfunc.errors import DataDependentError, SlowFallbackWarning

SIZES = (3, 2)  # the sizes of the innermost and the next batch dim


class Verdict(enum.IntEnum):
    """Of the cases of a row the highest counts."""

    NONE = 0  # torch itself refuses: nothing to compare
    OK = 1
    LOOP = 2
    DATA = 3  # a size or a Python value that differs from example to example: refused
    FAIL = 4
    WRONG = 5


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
        """Copies, for calls that write."""
        return [clone(x) for x in self.inputs]


@dataclass(frozen=True)
class Mode:
    """What is compared with what; both get inputs of their own and return stacked results.

    ``writes``: whether what a case writes is to be seen in the inputs afterwards.
    """

    name: str
    levels: int
    ours: Callable[[Case, Batch, Sequence[Tensor]], Results]
    plain: Callable[[Case, Batch, Sequence[Tensor]], Results]
    writes: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of one batch of one case."""

    verdict: Verdict
    what: str
    message: str = ""


def clone(x: Tensor) -> Tensor:
    """A copy in memory of its own, laid out alike."""
    return x.detach().clone()


def mapped(f: Callable[..., Results], batch: Batch, randomness: str = "error") -> Any:
    """``f`` under tsfunc's vmap, once for each level."""
    for dims in batch.dims:
        f = tsfunc.vmap(f, in_dims=dims, randomness=randomness)
    return f


def looped(f: Callable[..., Results], batch: Batch, *, alias: bool = False) -> Any:
    """``f`` in a Python loop for each level, and the results stacked.

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


def vmap_mode(levels: int, randomness: str = "error") -> Mode:
    """``vmap``, nested so many times."""

    def ours(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        out: Results = mapped(case.call, batch, randomness)(*inputs)
        return out

    def plain(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        out: Results = looped(case.call, batch)(*inputs)
        return out

    return Mode("vmap" if levels == 1 else "vmap(vmap)", levels, ours, plain)


VMAP, VMAP_VMAP = vmap_mode(1), vmap_mode(2)


def subsets(count: int, always: Sequence[int], limit: int = 3) -> Iterator[tuple[int, ...]]:
    """Which tensors are batched: every choice of few; of many all, each one, and all but one.

    All comes first. ``always`` are in every choice.
    """
    seen = set()
    places = range(count)
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


def physical(examples: Sequence[Tensor], at: int) -> Tensor:
    """The examples stacked at a dim, each laid out in memory as it was if it fills its memory."""
    first = examples[0]
    steps = first.stride()
    order = sorted(range(first.dim()), key=lambda d: (-steps[d], d))
    stacked = torch.stack([x.permute(order) for x in examples])
    back = [0] * (first.dim() + 1)
    for place, dim in enumerate(order):
        back[dim + 1] = place + 1
    inside = stacked.permute(back).movedim(0, at)
    if first.is_contiguous() and at:
        inside = inside.contiguous()
    return inside


def batch_of(
    case: Case, levels: Sequence[Sequence[int]], where: str, varied: bool, rng: random.Random
) -> Batch:
    """Batches a case's tensors: for each level those at the places given.

    ``where`` the batch dims lie: "first", "last", or "anywhere".
    """
    inputs = list(case.tensors)
    dims = []
    sizes = SIZES[: len(levels)]
    for level, chosen in enumerate(levels):
        at: list[int | None] = [None] * len(inputs)
        for i in chosen:
            x = inputs[i]
            step = 5**level
            examples = [vary(x, j * step) if varied else x for j in range(sizes[level])]
            spot = {"first": 0, "last": x.dim()}.get(where, rng.randint(0, x.dim()))
            inputs[i] = physical(examples, spot)
            at[i] = spot - inputs[i].dim() if where == "last" else spot
        dims.append(tuple(at))
    return Batch(tuple(inputs), tuple(dims), sizes)


def choices_of(case: Case, levels: int, rng: random.Random) -> Iterator[list[tuple[int, ...]]]:
    """For each way to batch the case, the tensors of each level."""
    inner = list(subsets(len(case.tensors), case.written))
    if levels == 1:
        yield from ([one] for one in inner)
        return
    for one in inner:
        others = [rng.choice(inner), inner[0]] if one is inner[0] else [rng.choice(inner)]
        for outer in others:
            # What is written at the inner level must not depend on what only the outer has.
            yield [one, outer]


TOLERANCES = {
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.bfloat16: 5e-2,
}


def compare(got: Results, want: Results) -> str:
    """What differs, or nothing."""
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if type(g) is not Tensor or g.shape != w.shape:
            return f"result {k}: {type(g).__name__} {tuple(g.shape)}, not {tuple(w.shape)}"
        if g.dtype is not w.dtype or g.layout != w.layout:
            return f"result {k}: {g.dtype} {g.layout}, not {w.dtype} {w.layout}"
        tolerance = TOLERANCES.get(w.dtype, 0)
        try:
            torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return f"result {k}: {error}".replace("\n", " ")
    return ""


def shapes_differ(got: Results, want: Results) -> str:
    """For values that are drawn or not defined: what differs in shapes and types."""
    mine, theirs = ([(tuple(x.shape), x.dtype) for x in out] for out in (got, want))
    return "" if mine == theirs else f"{mine}, not {theirs}"


def judge(
    mode: Mode, case: Case, batch: Batch, what: str, differ: Callable[..., str] = compare
) -> Outcome:
    """Runs both sides on one batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = mode.plain(case, batch, batch.fresh())
        except Exception as error:
            return Outcome(Verdict.NONE, what, f"{type(error).__name__}: {error}")
        mine = batch.fresh()
        # Warns once an operator: what was warned of before is to be seen again.
        fallback._warned.clear()
        warnings.simplefilter("error", SlowFallbackWarning)
        try:
            got = mode.ours(case, batch, mine)
        except SlowFallbackWarning as error:
            return Outcome(Verdict.LOOP, what, str(error))
        except DataDependentError as error:
            return Outcome(Verdict.DATA, what, f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome(Verdict.FAIL, what, f"{type(error).__name__}: {error}")
    difference = differ(got, want)
    if not difference and case.written and mode.writes and not case.reshapes:
        difference = differ(*_written(case, batch, mine, want))
        difference = difference and f"written inputs: {difference}"
    return Outcome(Verdict.WRONG if difference else Verdict.OK, what, difference)


def _written(
    case: Case, batch: Batch, inputs: Sequence[Tensor], want: Results
) -> tuple[Results, Results]:
    """What is in the inputs that were written, and what should be.

    Operators that change the shape of a tensor (``squeeze_``) do so to an example only.
    """
    count = len(case.written)
    mine, wanted = [], []
    for i, result in zip(case.written, want[-count:], strict=True):
        x = inputs[i]
        for level, dims in enumerate(reversed(batch.dims)):
            at = dims[i]
            assert at is not None
            x = x.movedim(at + level if at >= 0 else at, level)
        if x.shape == result.shape:
            mine.append(x)
            wanted.append(result)
    return tuple(mine), tuple(wanted)


def _describe(batch: Batch) -> str:
    return f"{[tuple(x.shape) for x in batch.inputs]} in_dims {[list(d) for d in batch.dims]}"


def sweep_case(
    mode: Mode,
    case: Case,
    rng: random.Random,
    wheres: Sequence[str] = ("first", "last", "anywhere"),
    differ: Callable[..., str] = compare,
) -> Iterator[Outcome]:
    """Every choice of batched tensors of one case, the batch dims lying in several ways.

    Values vary from example to example unless torch refuses them.
    """
    for levels in choices_of(case, mode.levels, rng):
        for where in wheres:
            for varied in (True, False):
                batch = batch_of(case, levels, where, varied, rng)
                outcome = judge(mode, case, batch, _describe(batch), differ)
                if outcome.verdict is not Verdict.NONE:
                    break
            yield outcome


def sweep(
    row: Row, dtype: torch.dtype, mode: Mode, most: int | None = None, **options: Any
) -> Iterator[Outcome]:
    """Every case of a row."""
    rng = random.Random(0)
    for case in row.cases(dtype, most):
        if case.tensors:
            yield from sweep_case(mode, case, rng, **options)
