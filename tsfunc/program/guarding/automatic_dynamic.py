"""Automatic named dims for sizes that differ from call to call.

NOTE [automatic dynamic sizes]
If three programs differ from a call only in one size, the program of the call is made for any such
size: it is traced with a symbol for the size. Sizes that have been equal in all of these calls
(the rows of a batch and of its labels) share one symbol. If the function relies on more than a
size of 2 or more, bounds restrict the program to the sizes for which the same facts hold, and
other sizes have programs of their own. If no bounds express the facts (the function needs the
number), each size keeps a program of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tsfunc.errors import ConstraintViolation
from tsfunc.program.guarding.cache_miss import Facts, differing
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.types import Dim

AFTER = 3  # number of programs that differ in a size
_ATTEMPTS = 3  # a bounded size may lead to facts that were not met before

T = TypeVar("T")

Sizes = frozenset[str]


def varying_sizes(facts: Facts, history: Iterable[Facts], sizes: Mapping[str, int]) -> Sizes:
    """Return the names of sizes that alone distinguish a call from enough others; or none.

    Args:
        facts: the facts of the call.
        history: the facts of the calls that programs were made for.
        sizes: the sizes of the call that no descriptor names.
    """
    seen: dict[Sizes, set[int]] = {}
    for others in history:
        names = frozenset(differing(facts, others))
        if not names or not all(name in sizes for name in names):
            continue
        then = {others.get(name) for name in names}
        now = {sizes[name] for name in names}
        (other, *rest) = then
        if not rest and len(now) == 1 and isinstance(other, int) and min(now) >= 2:
            seen.setdefault(names, set()).add(other)
    often = [names for names, others in seen.items() if len(others) >= AFTER]
    return min(often, key=len, default=frozenset())


def size_names(inputs: Sequence[InputSpec], names: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """Return the fixed sizes of inputs: the input and dim of each, by name.

    Args:
        inputs: the tensors among the arguments.
        names: the names of the flattened arguments.
    """
    return {
        f"{names[spec.position]}.shape[{k}]": (i, k)
        for i, spec in enumerate(inputs)
        for k, dim in enumerate(spec.dims)
        if isinstance(dim, int)
    }


def widened(
    trace: Callable[[Sequence[InputSpec], Mapping[str, Dim]], T],
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    at: Sequence[tuple[int, int]],
) -> T | None:
    """Return the result of a trace with a new named dim in place of some sizes.

    Returns:
        The result; None if the function relies on facts about the dim that bounds can't express.
    """
    names = itertools.chain(["n"], (f"n{i}" for i in itertools.count(2)))
    name = next(name for name in names if name not in bounds)
    dim, (i, k) = Dim(name, min=2), at[0]
    for _ in range(_ATTEMPTS):
        try:
            return trace(*_with_dim(inputs, bounds, at, dim))
        except ConstraintViolation as refusal:
            mended = refusal.mended.get(name)
            if not isinstance(mended, Dim) or len(refusal.mended) > 1:
                return None
            dim = mended.meet(Dim(name, min=2))
            if not dim.admits(inputs[i].example.shape[k]):
                return None
        except Exception:  # the trace without a symbol raises the error
            return None
    return None


def _with_dim(
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    at: Iterable[tuple[int, int]],
    dim: Dim,
) -> tuple[list[InputSpec], dict[str, Dim]]:
    """Return inputs with a named dim in place of some sizes."""
    found = list(inputs)
    for i, k in at:
        dims = list(found[i].dims)
        dims[k] = dim
        found[i] = dataclasses.replace(found[i], dims=tuple(dims))
    return found, {**bounds, dim.name: dim}
