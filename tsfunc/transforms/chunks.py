"""``chunk_size``: a ``vmap`` over some of the examples at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.transforms.out_dims import match_out_dims
from tsfunc.transforms.vmap_spec import Spec

# Runs the function on the inputs of some of the examples, and how many these are.
RunPart = Callable[[Sequence[Any], int], Any]


def run_in_chunks(
    spec: Spec,
    flat: Sequence[Any],
    at: Sequence[int | None],
    size: int,
    run: RunPart,
) -> Any:
    """Runs ``chunk_size`` examples at a time and puts the results together."""
    assert spec.chunk_size is not None
    seed = torch.get_rng_state() if spec.randomness == "same" else None
    outs = []
    for start in range(0, size, spec.chunk_size):
        length = min(spec.chunk_size, size - start)
        part = [
            value if dim is None else value.narrow(dim, start, length)
            for value, dim in zip(flat, at, strict=True)
        ]
        if seed is not None:
            torch.set_rng_state(seed)
        out = run(part, length)
        outs.append(pytrees.flatten(out))
    out_tree = outs[0][1]
    dims = match_out_dims(spec, pytrees.unflatten(out_tree, outs[0][0]), out_tree)
    joined = [
        parts[0] if dim is None or not isinstance(parts[0], torch.Tensor) else torch.cat(parts, dim)
        for parts, dim in zip(zip(*(leaves for leaves, _ in outs), strict=True), dims, strict=True)
    ]
    return pytrees.unflatten(out_tree, joined)
