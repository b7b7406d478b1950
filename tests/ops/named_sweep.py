"""Sweep the operator database with named sizes: compare programs for all sizes with the operator.

    for outcome in sweep(row, torch.float32, NAMED_BY_SIZE): ...

A case passes if the program that is traced for the sample agrees with the operator there, at three
other sizes, and with a named size of 0 or 1; and if this one program serves all sizes of 2 or more.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ops.database import FUNCTION, Case, Results, Row, rows
from tests.ops.named_dims import Named, Shapes, answer, inputs_at, named, named_by_size
from tests.ops.sweep import Outcome, Verdict, compare, shapes_differ
from tsfunc import specialize
from tsfunc.errors import ConstraintViolation, DataDependentError
from tsfunc.program.passes.effects import is_random

# Entries with undefined values in larger results.
_UNDEFINED = re.compile("empty|resize_")
NAMED_APART, NAMED_BY_SIZE = "names apart", "names by size"
WAYS: dict[str, Callable[[Case, str], Named | None]] = {
    NAMED_APART: named,
    NAMED_BY_SIZE: named_by_size,
}


@functools.cache
def entries() -> tuple[Row, ...]:
    """Return the entries that take strided tensors: the function variant only, once each."""
    return tuple(
        row
        for row in rows()
        if row.variant == FUNCTION
        and row.dtypes
        and row.name == row.entry
        and not row.name.startswith(("_foreach", "extra.", "Numpy"))
    )


def type_of(row: Row) -> torch.dtype:
    """Return the dtype in which an entry is swept."""
    wanted = (torch.float32, torch.complex64, torch.int64)
    return next((d for d in wanted if d in row.dtypes), min(row.dtypes, key=str))


def sweep(
    row: Row, dtype: torch.dtype, way: str, most: int | None = None, plain: bool = False
) -> Iterator[Outcome]:
    """Sweep every case of a row that has tensors; with ``plain``, run the operator alone."""
    for case in row.cases(dtype, most):
        if case.tensors:
            yield judge(case, row.entry, way, plain)


def judge(case: Case, entry: str, way: str, plain: bool = False) -> Outcome:
    """Judge one case with names found in one of the ``WAYS``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = WAYS[way](case, entry)
        if found is None:
            return Outcome(Verdict.NONE, way, "torch takes no other sizes")
        what = ", ".join(str(d) for d in found.descriptors().values())
        if plain:
            return Outcome(Verdict.OK, what)
        func = specialize(_with_parameters(case), found.descriptors())
        for shapes in (found.shapes, *found.others, *found.small):
            verdict, message = _at(func, found, shapes, entry)
            if verdict is not Verdict.OK:
                at = ", ".join(str(tuple(shape)) for shape in shapes)
                return Outcome(verdict, what, f"at {at}: {message}")
        return Outcome(Verdict.OK, what)


def _with_parameters(case: Case) -> Callable[..., Results]:
    """Return the case's function with a named parameter for each tensor, for descriptors."""
    names = ", ".join(f"x{i}" for i in range(len(case.tensors)))
    scope: dict[str, Any] = {"call": case.call}
    exec(f"def f({names}): return call({names})", scope)
    return scope["f"]


def _at(func: Any, found: Named, shapes: Shapes, entry: str) -> tuple[Verdict, str]:
    """Return the verdict on the program at some sizes."""
    want = answer(found.case, shapes)
    assert want is not None
    torch.manual_seed(0)
    try:
        got = func(*inputs_at(found.case, shapes))
    except (ConstraintViolation, DataDependentError) as error:
        return Verdict.DATA, f"{type(error).__name__}: {error}"
    except Exception as error:
        return Verdict.FAIL, f"{type(error).__name__}: {error}"
    # A program does not set the seed that its function sets.
    drawn = any(is_random(node) for node in func.program.graph.nodes)
    difference = (shapes_differ if drawn or _UNDEFINED.search(entry) else compare)(got, want)
    if difference:
        return Verdict.WRONG, difference
    programs = func.cache_info().programs
    if programs > 1 and all(map(functools.partial(_is_large, found), (found.shapes, shapes))):
        return Verdict.FAIL, f"{programs} programs: {func.cache_info().entries[0].reason}"
    return Verdict.OK, ""


def _is_large(found: Named, shapes: Shapes) -> bool:
    """True if the named sizes are 2 or more; one program must serve all such sizes."""
    return all(shapes[i][d] > 1 for i, d in found.names)
