"""``vmap``: a function of one example, made one of a batch.

The way of a call: the inputs are flattened and matched with ``in_dims`` (a plan, made once for
each structure); each tensor with a dim becomes a batched tensor of a new level; the function
runs; the results are taken out of their tracers and their batch dims put where ``out_dims`` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from tsfunc.bridge import hot
from tsfunc.bridge.autograd import out_of_inference
from tsfunc.bridge.batch_tracer import HOT, BatchLevel, wrap
from tsfunc.bridge.dynamo import outside_dynamo
from tsfunc.bridge.factories import watching_random
from tsfunc.bridge.functorch import delegate
from tsfunc.transforms.chunks import run_in_chunks
from tsfunc.transforms.in_dims import mapped, match_in_dims
from tsfunc.transforms.out_dims import match_out_dims, result_of
from tsfunc.transforms.vmap_spec import InDims, OutDims, Spec

InTree = Any  # the structure of the inputs, or, where they are tensors alone, how many


def vmap(
    func: Callable[..., Any],
    in_dims: InDims = 0,
    out_dims: OutDims = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Maps a function over a dim of its inputs, by batched operators instead of a loop.

    Args:
        func: takes and returns pytrees of tensors, for one example.
        in_dims: which dim of each positional input is mapped over: an int or None (not mapped)
            for all, or a pytree of them that is a prefix of the inputs. Negative dims count from
            the end. Keyword arguments are passed on unmapped.
        out_dims: where the mapped dim stands in each output: an int or a pytree prefix of the
            outputs. None for an output that is the same for every example, or no tensor.
        randomness: what random operators do: "error", "different" (a draw for each example) or
            "same" (one draw for all).
        chunk_size: how many examples are run at a time; None runs all at once. Bounds memory.

    Returns:
        A function of the batch. It can be nested, and composed with every other transform.

    Raises:
        ValueError: ``in_dims`` or ``out_dims`` do not fit, sizes differ, nothing is mapped.
        RuntimeError: a random operator in "error" mode, a value used in Python control flow.

    Example:
        >>> import torch
        >>> from tsfunc import vmap
        >>> vmap(torch.dot)(torch.ones(3, 2), torch.ones(3, 2))
        tensor([2., 2., 2.])

    As ``torch.func.vmap`` and, without axis names yet, ``jax.vmap``.
    """
    if randomness not in ("error", "different", "same"):
        raise RuntimeError(
            f"Only allowed values for randomness are 'error', 'different', or 'same'. "
            f"Got {randomness}"
        )
    if chunk_size is not None and not (chunk_size == chunk_size and chunk_size > 0):
        raise ValueError(f"vmap: chunk_size should be None or greater than 0. (got {chunk_size})")
    spec = Spec(func, in_dims, out_dims, randomness, chunk_size)
    plans: dict[Any, Sequence[int | None]] = {}
    out_plans: dict[Any, Sequence[int | None]] = {}

    @outside_dynamo
    def vmapped(*args: Any, **kwargs: Any) -> Any:
        if (other := delegate("vmap")) is not None:
            theirs = other(func, in_dims, out_dims, randomness, chunk_size=chunk_size)
            return theirs(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return out_of_inference(vmapped, *args, **kwargs)
        for arg in args:
            if not isinstance(arg, torch.Tensor):
                flat, tree = optree.tree_flatten(args, none_is_leaf=True)
                break
        else:
            # Tensors alone are flat already; their number is all there is to their structure.
            flat, tree = args, len(args)
        dims = plans.get(tree)
        if dims is None:
            dims = plans[tree] = match_in_dims(spec, args)
        at, size = mapped(spec, flat, dims)
        if spec.chunk_size is not None and spec.chunk_size < size:
            return run_in_chunks(
                spec,
                flat,
                at,
                size,
                lambda part, length: _run(spec, part, at, length, tree, kwargs, {}),
            )
        return _run(spec, flat, at, size, tree, kwargs, out_plans)

    # ``wraps`` also of callables without a name or docstring, as modules and partials are.
    return functools.wraps(func)(vmapped) if hasattr(func, "__name__") else vmapped


def _run(
    spec: Spec,
    flat: Sequence[Any],
    at: Sequence[int | None],
    size: Any,
    tree: InTree,
    kwargs: dict[str, Any],
    out_plans: dict[Any, Sequence[int | None]],
) -> Any:
    """One vmapped call, all examples at once."""
    if not HOT:
        hot.fill()
    level = BatchLevel(size, spec.randomness, spec.label)
    with level, watching_random():
        inputs: Any = [
            value if dim is None else wrap(value, dim, level)
            for value, dim in zip(flat, at, strict=True)
        ]
        if not isinstance(tree, int):
            inputs = optree.tree_unflatten(tree, inputs)
        out = spec.func(*inputs, **kwargs)
    if isinstance(out, torch.Tensor) and type(spec.out_dims) is int:
        return result_of(spec, out, spec.out_dims, level)
    leaves, out_tree = optree.tree_flatten(out, none_is_leaf=True)
    dims = out_plans.get(out_tree)
    if dims is None:
        dims = out_plans[out_tree] = match_out_dims(spec, out, out_tree)
    results = [result_of(spec, leaf, dim, level) for leaf, dim in zip(leaves, dims, strict=True)]
    return optree.tree_unflatten(out_tree, results)
