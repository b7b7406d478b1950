"""Rows of the operator database that fail under vmap, by name, with the reason.

These calls fail under torch.vmap too, or are impossible. ``docs/coverage.md`` and
``docs/coverage_derivatives.md`` list them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exempt:
    """The reason why a row may fail.

    Attributes:
        reason: the text for the pages.
        modes: the modes that may fail; all if empty.
        dtypes: the dtypes that may fail; all if empty.
    """

    reason: str
    modes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


_ONE = "the rule that the database registers for it takes one argument, the operator has two"
_REFUSES = "the rule that the database registers for it raises: its size depends on the data"
_BY_CAT = f"its tangent is found by `NumpyCatCustomOp`: {_ONE}"
_INTEGERS = tuple("uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool".split())

EXCEPTIONS: dict[str, Exempt] = {
    "NumpyCatCustomOp": Exempt(_ONE),
    "NumpySplitCopyCustomOp": Exempt(_BY_CAT, modes=("vmap(jvp)",)),
    "NumpySplitCopyWithIntCustomOp": Exempt(_BY_CAT, modes=("vmap(jvp)",)),
    "_foreach_add (inplace)": Exempt(
        "beside a list that is not batched Python asks a batched number for its value before "
        'anybody sees the call: refused; under `data_dependent="split"` without its derivative',
        modes=("grad(vmap)",),
    ),
    "NumpyNMSCustomOp": Exempt(_REFUSES),
    "NumpyNonzeroCustomOp": Exempt(_REFUSES),
    "NumpyMulScalarCustomOp": Exempt(
        "the rule that the database registers for it computes in float32, the operator in float64",
        dtypes=_INTEGERS,
    ),
}


def exception_of(row: str, dtype: str, mode: str) -> Exempt | None:
    """Return the exception for a row, in a dtype (``"float32"``) and a mode."""
    found = EXCEPTIONS.get(row)
    if found is None:
        return None
    there = (not found.modes or mode in found.modes) and (not found.dtypes or dtype in found.dtypes)
    return found if there else None
