"""Sweep the database: batch each case in many ways and compare a transform with the plain loop.

    for outcome in sweep(row, torch.float32, VMAP): ...

A ``Mode`` defines the comparison: tsfunc's transforms of a batch, and a Python loop that uses torch
alone. Other modes are made from ``mapped`` and ``looped``: for vmap(grad), ``mapped(ours_grad(f),
batch)`` and ``looped(torch_grad(f), batch)``.
"""

from __future__ import annotations

import enum
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.batches import Batch, batch_of, choices_of, looped, mapped, written_inputs
from tests.ops.database import Case, Results, Row
from tests.ops.exceptions import exception_of
from tsfunc.bridge.batch import fallback
from tsfunc.errors import DataDependentError, SlowFallbackWarning

# Entries that address memory: their batch dim comes first, so that each example is contiguous.
MEMORY = re.compile(r"as_strided")
# Entries with undefined values.
UNDEFINED = re.compile(r"empty")
# The refusal of randomness="same" for distributions that differ between examples.
ONE_FOR_ALL = "does not currently support same randomness"


class Verdict(enum.IntEnum):
    """The outcome of a case; a row's outcome is the largest of its cases."""

    NONE = 0  # torch itself refuses the call
    OK = 1
    SPLIT = 2  # right with data_dependent="split", and a clear error without it
    LOOP = 3
    DATA = 4  # refused: a size or a Python value differs from example to example
    FAIL = 5
    WRONG = 6


Run = Callable[[Case, Batch, Sequence[Tensor]], Results]


@dataclass(frozen=True)
class Mode:
    """A comparison of two functions, which get separate inputs and return stacked results.

    Attributes:
        split: the function to try if ``ours`` refuses a value that differs between examples.
        writes: True if the writes of a case must be visible in the inputs afterwards.
        drawn: the modes for cases that draw random numbers.
    """

    name: str
    levels: int
    ours: Run
    plain: Run
    split: Run | None = None
    writes: bool = True
    drawn: tuple[Mode, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one batch of one case."""

    verdict: Verdict
    what: str
    message: str = ""


def vmap_mode(levels: int, randomness: str = "error") -> Mode:
    """``vmap`` with several levels."""

    def run(**options: Any) -> Run:
        def ours(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
            return mapped(case.call, batch, randomness, **options)(*inputs)

        return ours

    def plain(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        return looped(case.call, batch)(*inputs)

    name = "vmap" if levels == 1 else "vmap(vmap)"
    split = run(data_dependent="split")
    if randomness != "error":
        return Mode(f"{name}, {randomness}", levels, run(), plain, split)
    drawn = tuple(vmap_mode(levels, kind) for kind in ("different", "same"))
    return Mode(name, levels, run(), plain, split, drawn=drawn)


VMAP, VMAP_VMAP = vmap_mode(1), vmap_mode(2)

TOLERANCES = {
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.bfloat16: 5e-2,
}
# In low precision, the error of a sum is relative to its largest terms.
_SHORT = (torch.float16, torch.bfloat16, torch.complex32)


def compare(got: Results, want: Results) -> str:
    """Return a description of the differences, or the empty string."""
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if type(g) is not Tensor or g.shape != w.shape:
            return f"result {k}: {type(g).__name__} {tuple(g.shape)}, not {tuple(w.shape)}"
        if g.dtype is not w.dtype or g.layout != w.layout:
            return f"result {k}: {g.dtype} {g.layout}, not {w.dtype} {w.layout}"
        rtol = atol = TOLERANCES.get(w.dtype, 0)
        if w.dtype in _SHORT and w.numel() and w.layout is torch.strided:
            largest = w.to(torch.complex64).abs().nan_to_num(0, 0, 0).max().item()
            atol *= max(1, largest)
        try:
            torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"result {k}: {error}".replace("\n", " ")
    return ""


def shapes_differ(got: Results, want: Results) -> str:
    """Return the differences in shapes and dtypes, for values that are random or undefined."""
    mine, theirs = ([(tuple(x.shape), x.dtype) for x in out] for out in (got, want))
    return "" if mine == theirs else f"{mine}, not {theirs}"


Differ = Callable[[Results, Results], str]


def judge(mode: Mode, case: Case, batch: Batch, differ: Differ = compare) -> Outcome:
    """Run both sides on one batch."""
    what = str(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = mode.plain(case, batch, batch.fresh())
        except Exception as error:
            return Outcome(Verdict.NONE, what, f"{type(error).__name__}: {error}")
        verdict, message, mine, got = _ours(mode.ours, case, batch)
        if verdict is Verdict.DATA and mode.split is not None:
            refused = message
            verdict, message, mine, got = _ours(mode.split, case, batch)
            if verdict is Verdict.OK:
                verdict, message = Verdict.SPLIT, refused
        if verdict is Verdict.FAIL and _refused_as_it_lies(case, batch):
            verdict = Verdict.NONE
    if verdict > Verdict.SPLIT or verdict is Verdict.NONE:
        return Outcome(verdict, what, message)
    difference = differ(got, want)
    if not difference and case.written and mode.writes and not case.reshapes:
        difference = differ(*written_inputs(case, batch, mine, want))
        difference = difference and f"written inputs: {difference}"
    return Outcome(Verdict.WRONG if difference else verdict, what, difference or message)


def _ours(run: Run, case: Case, batch: Batch) -> tuple[Verdict, str, list[Tensor], Results]:
    """Return the verdict on our side, its message, its inputs afterwards and its results."""
    mine = batch.fresh()
    # The warning is given once for each operator: allow it again.
    fallback._warned.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowFallbackWarning)
            return Verdict.OK, "", mine, run(case, batch, mine)
    except SlowFallbackWarning as error:
        return Verdict.LOOP, str(error), mine, ()
    except DataDependentError as error:
        return Verdict.DATA, f"{type(error).__name__}: {error}", mine, ()
    except Exception as error:
        return Verdict.FAIL, f"{type(error).__name__}: {error}", mine, ()


def _refused_as_it_lies(case: Case, batch: Batch) -> bool:
    """True if torch refuses examples with the memory layout that they have in the batch."""
    try:
        looped(case.call, batch, alias=True)(*batch.fresh())
    except Exception:
        return True
    return False


class _Count(TorchDispatchMode):
    """A mode that counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def loops_silently(mode: Mode, case: Case, chosen: Sequence[Sequence[int]]) -> str:
    """Return a message if more examples lead to more operator calls, else the empty string.

    Under data_dependent="split" they may.
    """
    counts = []
    for size in (2, 7):
        sizes = [size] * len(chosen)
        batch = batch_of(case, chosen, "first", False, random.Random(0), sizes)
        inputs = batch.fresh()
        try:
            with warnings.catch_warnings(), _Count() as seen:
                warnings.simplefilter("ignore")
                mode.ours(case, batch, inputs)
        except Exception:
            return ""  # the comparison reports the error
        counts.append(seen.calls)
    if counts[1] <= counts[0]:
        return ""
    return f"{counts[1]} operators for 7 examples, {counts[0]} for 2"


def without_examples(mode: Mode, case: Case, chosen: Sequence[Sequence[int]]) -> Outcome:
    """Run a batch of no examples, whose results must have the shapes of a batch of one example."""
    one, none = (
        batch_of(case, chosen, "first", False, random.Random(0), [size] * len(chosen))
        for size in (1, 0)
    )
    what = str(none)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = mode.plain(case, one, one.fresh())
        except Exception as error:
            return Outcome(Verdict.NONE, what, f"{type(error).__name__}: {error}")
        verdict, message, _, got = _ours(mode.ours, case, none)
    if verdict is Verdict.DATA:
        return Outcome(Verdict.NONE, what, message)  # an empty batch has no value to branch on
    if verdict is not Verdict.OK:
        return Outcome(verdict, what, message)
    empty = tuple(x.new_empty((*[0] * len(chosen), *x.shape[len(chosen) :])) for x in want)
    difference = shapes_differ(got, empty)
    return Outcome(Verdict.WRONG if difference else Verdict.OK, what, difference)


class _Draws(TorchDispatchMode):
    """A mode that records if a random operator is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def is_drawn(case: Case) -> bool:
    """True if a case draws random numbers."""
    with _Draws() as draws:
        try:
            case.call(*[x.clone() for x in case.tensors])
        except Exception:
            return False
    return bool(draws.seen)


def drawn_as(kind: str) -> Differ:
    """Return the differences of random results apart from their values."""

    def differ(got: Results, want: Results) -> str:
        difference = shapes_differ(got, want)
        if difference or kind == "same":
            return difference
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            # The examples of a loop draw one after another.
            if _all_alike(g) and not _all_alike(w):
                return f"result {k} is the same for every example"
        return ""

    return differ


def _all_alike(x: Tensor) -> bool:
    x = x.to(torch.complex64) if x.dtype is torch.complex32 else x  # dtypes without comparison
    return x.layout is torch.strided and torch.equal(x, x[:1].expand(x.shape))


def sweep_case(
    mode: Mode,
    case: Case,
    rng: random.Random,
    wheres: Sequence[str] = ("first", "last", "anywhere"),
    differ: Differ = compare,
) -> Iterator[Outcome]:
    """Sweep every choice of batched tensors of one case, with batch dims at several positions.

    Values vary from example to example unless torch refuses them.
    """
    for levels in choices_of(case, mode.levels, rng):
        for where in wheres:
            for varied in (True, False):
                outcome = judge(mode, case, batch_of(case, levels, where, varied, rng), differ)
                if outcome.verdict is not Verdict.NONE:
                    break
            yield outcome


def sweep(
    row: Row,
    dtype: torch.dtype,
    mode: Mode,
    most: int | None = None,
    wheres: Sequence[str] = ("first", "last", "anywhere"),
) -> Iterator[Outcome]:
    """Sweep every case of a row; the first ones also with no examples, and with more of them."""
    rng = random.Random(0)
    wheres = ("first",) if MEMORY.search(row.name) else wheres
    undefined = UNDEFINED.search(row.name) is not None
    for k, case in enumerate(row.cases(dtype, most)):
        if not any(x.layout is torch.strided for x in case.tensors):
            continue
        if is_drawn(case) and not undefined:
            for drawn in mode.drawn:
                differ = drawn_as(drawn.name.partition(", ")[2])
                for outcome in sweep_case(drawn, case, rng, wheres, differ):
                    if ONE_FOR_ALL not in outcome.message:
                        yield outcome
            continue
        yield from sweep_case(mode, case, rng, wheres, shapes_differ if undefined else compare)
        if k < 3:
            chosen = next(choices_of(case, mode.levels, random.Random(0)))
            yield without_examples(mode, case, chosen)
            silent = loops_silently(mode, case, chosen)
            if silent:
                yield Outcome(Verdict.LOOP, str(chosen), silent)


RIGHT = (Verdict.OK, Verdict.SPLIT, Verdict.NONE)


def check_row(
    sweep: Callable[[Row, torch.dtype, Mode, int], Iterator[Outcome]],
    row: Row,
    dtype: torch.dtype,
    mode: Mode,
    most: int,
) -> None:
    """Require that all outcomes of a sweep of a row are right, if the row is not an exception."""
    if exception_of(row.name, str(dtype).removeprefix("torch."), mode.name) is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for outcome in sweep(row, dtype, mode, most):
            assert outcome.verdict in RIGHT, (outcome.verdict.name, outcome.what, outcome.message)
