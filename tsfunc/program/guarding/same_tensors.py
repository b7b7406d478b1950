"""Arguments that are one tensor twice, or one that the function also has from elsewhere.

NOTE [one tensor twice]
A trace has a tracer for each tensor among the arguments, so ``x is y`` is false in it, and so it is
for most calls. Where the function's code compares by identity what may be tensors (``code_reads``
tells), arguments that are one tensor are one tracer, an argument that the function has from
elsewhere (a parameter of its module) is that tensor, and later calls are held to what is one there
and what is not. Other functions have one program for either kind of call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.reading.reach import Facts

Groups = tuple[tuple[int, ...], ...]


class ToldApart(Exception):
    """Internal: two of a function's tensors are one, and it may look; so it is traced again.

    Args:
        own: the function's own tensors that are known.
    """

    def __init__(self, own: Mapping[int, torch.Tensor]) -> None:
        super().__init__("a tensor is given twice")
        self.own = own


def as_one(
    inputs: Sequence[InputSpec], tracers: Sequence[Any], own: Mapping[int, torch.Tensor]
) -> list[Any]:
    """What the function is given for its tensors: one object for each tensor.

    Args:
        inputs: the tensors among the arguments.
        tracers: what stands for them.
        own: tensors that the function has from elsewhere, by id.
    """
    first: dict[int, Any] = dict(own)
    return [
        first.setdefault(id(spec.example), tracer)
        for spec, tracer in zip(inputs, tracers, strict=True)
    ]


def groups_of(inputs: Sequence[InputSpec]) -> Groups:
    """The positions of the tensors among the arguments, those together that are one tensor."""
    found: dict[int, list[int]] = {}
    for spec in inputs:
        found.setdefault(id(spec.example), []).append(spec.position)
    return tuple(tuple(group) for group in found.values())


def condition(groups: Groups) -> str | None:
    """The Python for that the flattened arguments are one where these are, and only there."""
    parts = [f"args[{one}] is args[{other}]" for one, *others in groups for other in others]
    if len(groups) > 1:
        ids = ", ".join(f"id(args[{group[0]}])" for group in groups)
        parts.append(f"len({{{ids}}}) == {len(groups)}")
    return " and ".join(parts) or None


def hold(facts: Facts, inputs: Sequence[InputSpec], own: Mapping[int, torch.Tensor]) -> None:
    """Holds later calls to which of their tensors the function also has from elsewhere."""
    elsewhere = facts.name(frozenset(own)) if own else None
    for spec in inputs:
        tensor = own.get(id(spec.example))
        if tensor is not None:
            facts.require(f"args[{spec.position}] is {facts.name(tensor)}")
        elif elsewhere is not None:
            facts.require(f"id(args[{spec.position}]) not in {elsewhere}")
