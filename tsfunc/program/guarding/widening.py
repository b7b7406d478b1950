"""Sizes that become named dims by themselves, when call after call has another one.

NOTE [widening]
After the third program that differs from a call in nothing but one size, the call's program is
made for any such size: it is traced with a symbol in its place. Sizes that have been equal to each
other in all of these calls (the rows of a batch and of its labels) are one size. Where the function
asks for more of the size than that it is 2 or more, the program is for those of which the answers
are the call's, if bounds tell them, and others have theirs. Where no bounds do, as where the
function needs the number, each size goes on having a program of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tsfunc.errors import ConstraintViolation
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.guarding.reasons import Facts, differing
from tsfunc.types import Dim

AFTER = 3  # programs that differ in a size
_ATTEMPTS = 3  # what is asked where a size is bounded may be more than what was asked before

T = TypeVar("T")

Sizes = frozenset[str]


def varying_sizes(facts: Facts, history: Iterable[Facts], sizes: Mapping[str, int]) -> Sizes:
    """The sizes, by name, that are all in which a call differs from enough others; or none.

    Args:
        facts: the call's.
        history: those of the calls that programs were made for.
        sizes: those of the call that no descriptor speaks of.
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
    """The sizes of inputs that are numbers: for the name of each its input and dim.

    Args:
        inputs: the tensors among the arguments.
        names: what each of the flattened arguments is called.
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
    """What a trace makes with a new named dim in the places of some sizes.

    Returns:
        None where the function asks for more of the dim than bounds can tell.
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
        except Exception:  # the function needs the number: the trace without a symbol will tell
            return None
    return None


def _with_dim(
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    at: Iterable[tuple[int, int]],
    dim: Dim,
) -> tuple[list[InputSpec], dict[str, Dim]]:
    """Inputs with a named dim in the places of some sizes."""
    found = list(inputs)
    for i, k in at:
        dims = list(found[i].dims)
        dims[k] = dim
        found[i] = dataclasses.replace(found[i], dims=tuple(dims))
    return found, {**bounds, dim.name: dim}
