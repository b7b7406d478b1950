"""``out_dims``: results taken out of their tracers, the batch dim where the caller wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

from tsfunc.bridge.batch_tracer import BatchLevel, BatchTracer
from tsfunc.transforms.vmap_spec import Spec, broadcast_prefix, is_dim


def match_out_dims(spec: Spec, out: Any, tree: optree.PyTreeSpec) -> Sequence[int | None]:
    """An entry of ``out_dims`` for each flattened output."""
    bad = [
        dim
        for dim in optree.tree_leaves(spec.out_dims, is_leaf=is_dim, none_is_leaf=True)
        if not is_dim(dim)
    ]
    if bad or isinstance(spec.out_dims, str):
        raise ValueError(
            f"vmap({spec.name}, ..., out_dims={spec.out_dims}): `out_dims` must be an int, None "
            f"or a python collection of ints representing where in the outputs the vmapped "
            f"dimension should appear."
        )
    try:
        if isinstance(out, torch.Tensor) and not is_dim(spec.out_dims):
            # A collection of one dim is taken for a single tensor, as torch.func takes it.
            (only,) = optree.tree_leaves(spec.out_dims, none_is_leaf=True)
            return [only]
        return broadcast_prefix(spec.out_dims, out)
    except ValueError:
        raise ValueError(
            f"{spec.call(out=True)}: out_dims is not compatible with the structure of `outputs`. "
            f"out_dims has structure {optree.tree_structure(spec.out_dims, none_is_leaf=True)} "
            f"but outputs has structure {tree}."
        ) from None


def result_of(spec: Spec, leaf: Any, out_dim: int | None, level: BatchLevel) -> Any:
    """An output taken out of its tracer, its batch dim where the caller wants it."""
    if isinstance(leaf, BatchTracer) and leaf.dispatch_level is level:
        value, bdim = leaf.value, leaf.bdim
    elif isinstance(leaf, torch.Tensor):
        value, bdim = leaf, None
    elif out_dim is None:
        return leaf
    else:
        raise ValueError(
            f"vmap({spec.name}, ...): `{spec.name}` must only return Tensors, got type "
            f"{type(leaf)}. Did you mean to set the `out_dims=` argument to None for this output?"
        )
    if out_dim is None:
        if bdim is not None:
            raise ValueError(
                f"vmap({spec.name}, ...): `{spec.name}` can not return a BatchedTensor when "
                f"out_dim is None: this output differs from example to example. Give it an "
                f"out_dim."
            )
        return value
    rank = value.dim() + (bdim is None)
    if not -rank <= out_dim < rank:
        raise IndexError(
            f"{spec.call(out=True)}: Dimension out of range (expected to be in range of "
            f"[{-rank}, {rank - 1}], but got {out_dim})"
        )
    if out_dim < 0:
        out_dim += rank
    if bdim is None:
        shape = list(value.shape)
        shape.insert(out_dim, level.batch_size)
        return value.unsqueeze(out_dim).expand(shape)
    return value if bdim == out_dim else value.movedim(bdim, out_dim)
