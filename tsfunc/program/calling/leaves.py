"""Places of the flattened arguments of a call among its parameters, and their descriptors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree

from tsfunc import pytrees
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.types import MetaTensorType


def described(
    leaves: Sequence[Any],
    inputs: Sequence[InputSpec],
    tree: optree.PyTreeSpec,
    parameters: inspect.Signature,
) -> dict[str, Any]:
    """Return descriptors of flattened arguments by parameter, with the inputs' tensor types."""
    flat = list(leaves)
    for spec in inputs:
        flat[spec.position] = MetaTensorType(
            list(spec.dims),
            dtype=spec.example.dtype,
            device=spec.example.device,
            requires_grad=None if spec.any_grad else spec.example.requires_grad,
            layout=spec.example.layout,
        )
    args, kwargs = optree.tree_unflatten(tree, flat)
    return dict(parameters.bind(*args, **kwargs).arguments)


def places_of(
    signature: inspect.Signature, count: int, tree: optree.PyTreeSpec
) -> dict[int, tuple[Any, ...]]:
    """Return the path of each flattened argument from a parameter."""
    numbers = [_Place(i) for i in range(count)]
    args, kwargs = optree.tree_unflatten(tree, numbers)
    places: dict[int, tuple[Any, ...]] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        paths, leaves, _ = optree.tree_flatten_with_path(
            value, none_is_leaf=True, namespace=pytrees.NAMESPACE
        )
        for path, leaf in zip(paths, leaves, strict=True):
            places[leaf.index] = (name, *path)
    return places


def spelled(path: Sequence[Any]) -> str:
    """Return the path of an argument in the user's spelling."""
    return str(path[0]) + "".join(f"[{entry!r}]" for entry in path[1:])


@dataclass(frozen=True)
class _Place:
    """Stand-in for a flattened argument whose path is looked up."""

    index: int
