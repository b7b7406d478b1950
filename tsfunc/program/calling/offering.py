"""Descriptors that are offered to the user for values that vary, as Python code."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.program.closure.guard_builder import is_instance
from tsfunc.types import MetaTensorType, as_descriptor
from tsfunc.types.descriptor_sets import as_python
from tsfunc.types.descriptors import child_at
from tsfunc.types.grammar import (
    Descriptor,
    TSFields,
    TSNamedTuple,
    TSPytree,
    TSTensor,
    TSTuple,
)


def descriptors_text(
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    places: Mapping[int, tuple[Any, ...]],
    signature: inspect.Signature,
    described: Mapping[str, Descriptor],
    vary: Mapping[int, Mapping[int, str]],
) -> str:
    """Return descriptors for which some values of a call may vary, as Python code.

    They promise nothing else beside what the function's descriptors promise already.

    Args:
        flat: the flattened arguments.
        tree: their structure.
        places: the path of each from a parameter.
        signature: the parameters of the function.
        described: the descriptors that the function has.
        vary: the positions of the values that vary; for a tensor the dims, each with a name.

    Raises:
        DescriptorError: an argument that contains one of the values can't be described.
    """
    leaves = [_leaf(value, _at(described, places[i]), vary.get(i)) for i, value in enumerate(flat)]
    args, kwargs = optree.tree_unflatten(tree, leaves)
    given = signature.bind(*args, **kwargs).arguments
    concerned = {places[i][0] for i in vary}
    found = dict(described)
    for name in given:
        if name in concerned:
            found[name] = as_descriptor(given[name], name)
    return f"{{{', '.join(f'{name!r}: {as_python(each)}' for name, each in found.items())}}}"


def _at(described: Mapping[str, Descriptor], path: Sequence[Any]) -> Descriptor | None:
    """Return the given descriptor of an argument, if it is a part of a container's."""
    found = described.get(path[0])
    for i in range(1, len(path)):
        if not isinstance(found, TSPytree | TSTuple | TSNamedTuple | TSFields):
            return None
        found = child_at(found, tuple(path[i:]))
    return found


def _leaf(value: Any, given: Descriptor | None, vary: Mapping[int, str] | None) -> Any:
    """Return the descriptor of an argument.

    Args:
        value: the argument.
        given: its descriptor so far.
        vary: the dims of a tensor that vary, by number; None: nothing varies.
    """
    if isinstance(value, torch.Tensor):
        meta = given.meta if isinstance(given, TSTensor) else MetaTensorType()
        shape = _dims(meta, value.dim())
        for k, name in (vary or {}).items():
            shape[k] = name
        return dataclasses.replace(meta, shape=tuple(shape)) if vary else given or meta
    if vary is None and given is not None:
        return given
    if type(value) in (int, float, bool, str) or is_instance(value):
        return type(value)
    return value


def _dims(meta: MetaTensorType, rank: int) -> list[Any]:
    """Return the described sizes of a tensor, None for each that is open."""
    shape = list(meta.shape or [...])
    if ... in shape:
        at = shape.index(...)
        shape[at : at + 1] = [None] * (rank - len(shape) + 1)
    return shape
