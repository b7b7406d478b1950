"""``in_dims``: which dim of each input a ``vmap`` maps over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

from tsfunc.transforms.vmap_spec import Spec, broadcast_prefix


def match_in_dims(spec: Spec, args: Any) -> Sequence[int | None]:
    """An entry of ``in_dims`` for each flattened input."""
    tree = optree.tree_structure(args, none_is_leaf=True)
    if not isinstance(spec.in_dims, int | tuple):
        raise ValueError(
            f"{spec.call()}: expected `in_dims` to be int or a (potentially nested) tuple "
            f"matching the structure of inputs, got: {type(spec.in_dims)}."
        )
    if not tree.num_leaves:
        raise ValueError(
            f"vmap({spec.name})(<inputs>): got no inputs. Maybe you forgot to add inputs, or you "
            f"are trying to vmap over a function with no inputs. The latter is unsupported."
        )
    try:
        dims = broadcast_prefix(spec.in_dims, args)
    except ValueError:
        raise ValueError(
            f"{spec.call()}: in_dims is not compatible with the structure of `inputs`. in_dims "
            f"has structure {optree.tree_structure(spec.in_dims, none_is_leaf=True)} but inputs "
            f"has structure {tree}. Give one entry for each positional input (it may hold for "
            f"all that is in it)."
        ) from None
    for dim in dims:
        if dim is not None and not isinstance(dim, int):
            raise ValueError(
                f"{spec.call()}: Got in_dim={dim} for an input but in_dim must be either "
                f"an integer dimension or None."
            )
    return dims


def mapped(
    spec: Spec, flat: Sequence[Any], dims: Sequence[int | None]
) -> tuple[list[int | None], Any]:
    """The dims counted from the front, and the size that the mapped dims share."""
    at: list[int | None] = []
    size: Any = None
    for value, dim in zip(flat, dims, strict=True):
        if dim is None:
            at.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{spec.call()}: Got in_dim={dim} for an input but the input is of type "
                f"{type(value)}. We cannot vmap over non-Tensor arguments, please use None as "
                f"the respective in_dim"
            )
        shape = value.shape
        rank = len(shape)
        if not -rank <= dim < rank:
            raise ValueError(
                f"{spec.call()}: Got in_dim={dim} for some input, but that input is a Tensor of "
                f"dimensionality {rank} so expected in_dim to satisfy -{rank} <= in_dim < {rank}."
            )
        if dim < 0:
            dim += rank
        at.append(dim)
        if size is None:
            size = shape[dim]
        elif size != shape[dim]:
            _refuse_sizes(spec, flat, dims)
    if size is None:
        raise ValueError(
            f"{spec.call()}: Expected at least one Tensor to vmap over: every in_dim is None, "
            f"or there is no Tensor among the inputs."
        )
    return at, size


def _refuse_sizes(spec: Spec, flat: Sequence[Any], dims: Sequence[int | None]) -> None:
    sizes = [value.shape[dim] for value, dim in zip(flat, dims, strict=True) if dim is not None]
    raise ValueError(
        f"{spec.call()}: Expected all tensors to have the same size in the mapped dimension, "
        f"got sizes {sizes} for the mapped dimension"
    )
