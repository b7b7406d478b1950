"""Arguments that are the same tensor, or a tensor that the function also has from elsewhere.

NOTE [tensor aliasing]
A trace makes a tracer for each tensor among the arguments, so ``x is y`` is False in the trace, as
it is in most calls. If the function's code has an identity comparison of objects that may be
tensors (``code_reads`` detects it), equal arguments share one tracer, and an argument that the
function has from elsewhere (a parameter of its module) is passed as that tensor. Later calls are
then guarded on the same identities. Other functions have one program for both kinds of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsfunc.program.closure.guard_codegen import GuardLines
from tsfunc.program.guarding.inputs import InputSpec

Groups = tuple[tuple[int, ...], ...]


def as_one(
    inputs: Sequence[InputSpec], tracers: Sequence[Any], own: Mapping[int, torch.Tensor]
) -> list[Any]:
    """Return the values that the function gets for its tensors: one object for each tensor.

    Args:
        inputs: the tensors among the arguments.
        tracers: their tracers.
        own: tensors that the function has from elsewhere, by id.
    """
    first: dict[int, Any] = dict(own)
    return [
        first.setdefault(id(spec.example), tracer)
        for spec, tracer in zip(inputs, tracers, strict=True)
    ]


def groups_of(inputs: Sequence[InputSpec]) -> Groups:
    """Return the positions of the tensors among the arguments, grouped by identity."""
    found: dict[int, list[int]] = {}
    for spec in inputs:
        found.setdefault(id(spec.example), []).append(spec.position)
    return tuple(tuple(group) for group in found.values())


def condition(groups: Groups) -> str | None:
    """Return the Python condition that the flattened arguments have exactly these identities."""
    parts = [f"args[{one}] is args[{other}]" for one, *others in groups for other in others]
    if len(groups) > 1:
        ids = ", ".join(f"id(args[{group[0]}])" for group in groups)
        parts.append(f"len({{{ids}}}) == {len(groups)}")
    return " and ".join(parts) or None


def hold(
    guard_lines: GuardLines, inputs: Sequence[InputSpec], own: Mapping[int, torch.Tensor]
) -> None:
    """Guard the arguments that are, or are not, tensors that the function has from elsewhere."""
    elsewhere = guard_lines.name(frozenset(own)) if own else None
    for spec in inputs:
        tensor = own.get(id(spec.example))
        if tensor is not None:
            guard_lines.require(f"args[{spec.position}] is {guard_lines.name(tensor)}")
        elif elsewhere is not None:
            guard_lines.require(f"id(args[{spec.position}]) not in {elsewhere}")
