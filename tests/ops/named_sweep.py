"""Sweeps the operator database with names for sizes: programs for all sizes, held to the operator.

for outcome in sweep(row, torch.float32, NAMED_BY_SIZE): ...

A case is right if the program that is traced for the sample agrees with the operator there, at
three other sizes, and where a named size is 0 or 1; and if sizes of 2 or more need no other one.
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

# Entries whose values are not defined, where they are larger than before.
_UNDEFINED = re.compile("empty|resize_")
NAMED_APART, NAMED_BY_SIZE = "names apart", "names by size"
WAYS: dict[str, Callable[[Case, str], Named | None]] = {
    NAMED_APART: named,
    NAMED_BY_SIZE: named_by_size,
}


@functools.cache
def entries() -> tuple[Row, ...]:
    """The entries of the database that take strided tensors: their functions alone, once each."""
    return tuple(
        row
        for row in rows()
        if row.variant == FUNCTION
        and row.dtypes
        and row.name == row.entry
        and not row.name.startswith(("_foreach", "extra.", "Numpy"))
    )


def type_of(row: Row) -> torch.dtype:
    """The type that an entry is tried in."""
    wanted = (torch.float32, torch.complex64, torch.int64)
    return next((d for d in wanted if d in row.dtypes), min(row.dtypes, key=str))


def sweep(
    row: Row, dtype: torch.dtype, way: str, most: int | None = None, plain: bool = False
) -> Iterator[Outcome]:
    """Every case of a row that has tensors; with ``plain`` the operator alone is run."""
    for case in row.cases(dtype, most):
        if case.tensors:
            yield judge(case, row.entry, way, plain)


def judge(case: Case, entry: str, way: str, plain: bool = False) -> Outcome:
    """One case with names found in one of the ``WAYS``."""
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
    """The case's function with a parameter for each tensor, which descriptors can speak of."""
    names = ", ".join(f"x{i}" for i in range(len(case.tensors)))
    scope: dict[str, Any] = {"call": case.call}
    exec(f"def f({names}): return call({names})", scope)
    func: Callable[..., Results] = scope["f"]
    return func


def _at(func: Any, found: Named, shapes: Shapes, entry: str) -> tuple[Verdict, str]:
    """How the program fares at some sizes."""
    want = answer(found.case, shapes)
    assert want is not None
    torch.manual_seed(0)
    try:
        got = func(*inputs_at(found.case, shapes))
    except (ConstraintViolation, DataDependentError) as error:
        return Verdict.DATA, f"{type(error).__name__}: {error}"
    except Exception as error:
        return Verdict.FAIL, f"{type(error).__name__}: {error}"
    # A seed that is set inside of a function is not set by its program.
    drawn = any(is_random(node) for node in func.program.graph.nodes)
    difference = (shapes_differ if drawn or _UNDEFINED.search(entry) else compare)(got, want)
    if difference:
        return Verdict.WRONG, difference
    programs = func.cache_info().programs
    if programs > 1 and all(map(functools.partial(_is_large, found), (found.shapes, shapes))):
        return Verdict.FAIL, f"{programs} programs: {func.cache_info().entries[0].reason}"
    return Verdict.OK, ""


def _is_large(found: Named, shapes: Shapes) -> bool:
    """True if the named sizes are 2 or more, which one program must serve."""
    return all(shapes[i][d] > 1 for i, d in found.names)
