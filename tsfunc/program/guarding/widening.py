"""Sizes that become named dims by themselves, when call after call has another one.

NOTE [widening]
After the third program that differs from a call in nothing but one size, the call's program is
made for any such size: it is traced with a symbol in its place. Sizes that have been equal to each
other in all of these calls (the rows of a batch and of its labels) are one size. Where the function
asks for more of the size than that it is 2 or more, each goes on having a program of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.guarding.reasons import Facts, differing
from tsfunc.types import Dim

AFTER = 3  # programs that differ in a size

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


def widen(
    inputs: Sequence[InputSpec], bounds: Mapping[str, Dim], at: Iterable[tuple[int, int]]
) -> tuple[list[InputSpec], dict[str, Dim]]:
    """Inputs with a new named dim in the places of some sizes."""
    name, number = "n", 1
    while name in bounds:
        number += 1
        name = f"n{number}"
    dim = Dim(name, min=2)
    widened = list(inputs)
    for i, k in at:
        dims = list(widened[i].dims)
        dims[k] = dim
        widened[i] = dataclasses.replace(widened[i], dims=tuple(dims))
    return widened, {**bounds, name: dim}
