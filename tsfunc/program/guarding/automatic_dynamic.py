"""Automatic named dims and inputs for sizes and numbers that differ from call to call.

NOTE [automatic dynamic sizes]
If two programs differ from a call only in one size, the program of the call is made for any such
size: it is traced with a symbol for the size. Sizes that have been equal in all of these calls
(the rows of a batch and of its labels) share one symbol. If the function relies on more than a
size of 2 or more, bounds restrict the program to the sizes for which the same facts hold, and
other sizes have programs of their own. If no bounds express the facts (the function needs the
number), each size keeps a program of its own.

Numbers that vary become inputs in the same way: NOTE [numbers by their types] in ``inputs``. The
user has not asked for symbols, and ``isinstance(k, int)`` is false for a symbol. The program is
therefore compared with the program for the numbers of the call, and kept only if it does the same
with them; numbers of 0 and 1 wait for others, since ``x * 1`` has no operator. A text of such a
symbol is the text of the number, and makes it a constant. If the function needs a number itself,
the other numbers become inputs without it.

A value that keeps a program for each of its values is reported by a ``RetraceWarning``
(``retraces``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tsfunc.errors import ConstraintViolation
from tsfunc.program.assumptions import Assumptions
from tsfunc.program.guarding.cache_miss import Facts, differing
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.types import Dim

AFTER = 2  # number of programs that differ in a size or number
_ATTEMPTS = 2  # a bounded size may lead to facts that were not met before

Names = frozenset[str]


def varying(
    facts: Facts,
    history: Iterable[Facts],
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
    needed: Names = frozenset(),
) -> Names:
    """Return the names of values that alone distinguish a call from enough others; or none.

    Args:
        facts: the facts of the call.
        history: the facts of the calls that programs were made for.
        sizes: the sizes of the call that no descriptor names.
        numbers: the numbers of the call that can become inputs.
        needed: the names of numbers that stay constants.
    """
    seen: dict[Names, set[tuple[Any, ...]]] = {}
    for others in history:
        names = differing(facts, others)
        if not names or not all(_alike(name, facts, others, sizes, numbers) for name in names):
            continue
        then = {others[name] for name in names if name in sizes}
        now = {sizes[name] for name in names if name in sizes}
        waits = any(is_special(facts[name]) for name in names if name not in needed)
        if len(then) <= 1 and len(now) <= 1 and not waits:
            seen.setdefault(frozenset(names), set()).add(tuple(others[name] for name in names))
    often = [names - needed for names, others in seen.items() if len(others) >= AFTER]
    return min(filter(None, often), key=len, default=frozenset())


def is_special(value: int | float) -> bool:
    """Return True if a program for a size or number alone may be simpler: ``x * 1`` is ``x``."""
    return value in (0, 1)


def seen_values(
    facts: Facts,
    history: Iterable[Facts],
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
) -> dict[str, list[Any]]:
    """Return the earlier values of each size and number in which a call differs from others.

    A value counts if enough calls differ from this one in it and in the same other values. The
    arguments are those of :func:`varying`; the values are in the order of ``history``.
    """
    calls: dict[Names, list[Facts]] = {}
    for others in history:
        names = differing(facts, others)
        if names and all(_alike(name, facts, others, sizes, numbers) for name in names):
            calls.setdefault(frozenset(names), []).append(others)
    seen: dict[str, list[Any]] = {}
    for group, earlier in calls.items():
        for name in (name for name in facts if name in group):
            values = list(dict.fromkeys(others[name] for others in earlier))
            if len(values) >= AFTER:
                seen.setdefault(name, values)
    return seen


def _alike(
    name: str,
    facts: Facts,
    others: Facts,
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
) -> bool:
    """Return True if a difference is between two sizes, or two numbers of one type."""
    return (name in sizes or name in numbers) and type(others.get(name)) is type(facts[name])


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


def new_dim(bounds: Mapping[str, Dim]) -> Dim:
    """Return a named dim in place of sizes that have varied."""
    names = itertools.chain(["n"], (f"n{i}" for i in itertools.count(2)))
    return Dim(next(name for name in names if name not in bounds), min=2)


def narrowed(assumptions: Assumptions, size: int, error: Exception) -> Assumptions | None:
    """Return assumptions with a narrower dim for sizes that have varied, if that is the remedy.

    Args:
        assumptions: those of the trace that has failed.
        size: the size of the dim in the call.
        error: the error of the trace.
    """
    dim = assumptions.dim
    if dim is None or not isinstance(error, ConstraintViolation):
        return None
    mended = error.mended.get(dim.name)
    if not isinstance(mended, Dim) or len(error.mended) > 1 or assumptions.narrowed == _ATTEMPTS:
        return None
    narrower = mended.meet(Dim(dim.name, min=2))
    if not narrower.admits(size):
        return None
    return assumptions.moved(dim=narrower, narrowed=assumptions.narrowed + 1)


def with_dim(
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
