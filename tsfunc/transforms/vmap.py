"""``vmap``: a function of one example, made one of a batch.

The way of a call: the inputs are flattened and matched with ``in_dims`` (a plan, made once for
each structure); each tensor with a dim becomes a batched tensor of a new level; the function
runs; the results are taken out of their tracers and their batch dims put where ``out_dims`` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from tsfunc.bridge import hot
from tsfunc.bridge.autograd import out_of_inference
from tsfunc.bridge.batch_tracer import HOT, BatchLevel, BatchTracer, wrap
from tsfunc.bridge.dynamo import outside_dynamo
from tsfunc.bridge.factories import watching_random
from tsfunc.bridge.functorch import delegate
from tsfunc.bridge.tracer import Tracer

InDims = Any
InTree = Any  # the structure of the inputs, or, where they are tensors alone, how many
OutDims = Any


@dataclass(frozen=True)
class _Spec:
    """The arguments of ``vmap`` itself."""

    func: Callable[..., Any]
    in_dims: InDims
    out_dims: OutDims
    randomness: str
    chunk_size: int | None

    @property
    def name(self) -> str:
        return name_of(self.func)

    @functools.cached_property
    def label(self) -> str:
        """What errors call an active one."""
        return f"vmap({self.name})"

    def call(self, *, out: bool = False) -> str:
        """The call as the user wrote it, for messages."""
        if out:
            return f"vmap({self.name}, ..., out_dims={self.out_dims})(<inputs>)"
        return f"vmap({self.name}, in_dims={self.in_dims}, ...)(<inputs>)"


def name_of(func: Callable[..., Any]) -> str:
    """How messages call a function."""
    if isinstance(func, functools.partial):
        return f"functools.partial({name_of(func.func)}, ...)"
    return getattr(func, "__name__", None) or repr(func)


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
    spec = _Spec(func, in_dims, out_dims, randomness, chunk_size)
    plans: dict[Any, Sequence[int | None]] = {}
    out_plans: dict[Any, Sequence[int | None]] = {}

    @outside_dynamo
    def vmapped(*args: Any, **kwargs: Any) -> Any:
        if (other := delegate("vmap")) is not None:
            mapped = other(func, in_dims, out_dims, randomness, chunk_size=chunk_size)
            return mapped(*args, **kwargs)
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
            dims = plans[tree] = _match_in_dims(spec, args)
        at, size = _mapped(spec, flat, dims)
        if spec.chunk_size is not None and spec.chunk_size < size:
            return _chunked(spec, flat, at, size, tree, kwargs)
        return _run(spec, flat, at, size, tree, kwargs, out_plans)

    # ``wraps`` also of callables without a name or docstring, as modules and partials are.
    return functools.wraps(func)(vmapped) if hasattr(func, "__name__") else vmapped


def _match_in_dims(spec: _Spec, args: Any) -> Sequence[int | None]:
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
        dims = _broadcast_prefix(spec.in_dims, args)
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


def _broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """The prefix's leaf for each leaf of the tree; an int or None stands for all below it."""
    found: list[Any] = optree.broadcast_prefix(prefix, tree, is_leaf=_is_dim, none_is_leaf=True)
    return found


def _is_dim(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _mapped(
    spec: _Spec, flat: Sequence[Any], dims: Sequence[int | None]
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


def _refuse_sizes(spec: _Spec, flat: Sequence[Any], dims: Sequence[int | None]) -> None:
    sizes = [value.shape[dim] for value, dim in zip(flat, dims, strict=True) if dim is not None]
    raise ValueError(
        f"{spec.call()}: Expected all tensors to have the same size in the mapped dimension, "
        f"got sizes {sizes} for the mapped dimension"
    )


def _run(
    spec: _Spec,
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
        return _result(spec, out, spec.out_dims, level)
    leaves, out_tree = optree.tree_flatten(out, none_is_leaf=True)
    dims = out_plans.get(out_tree)
    if dims is None:
        dims = out_plans[out_tree] = _match_out_dims(spec, out, out_tree)
    results = [_result(spec, leaf, dim, level) for leaf, dim in zip(leaves, dims, strict=True)]
    return optree.tree_unflatten(out_tree, results)


def _match_out_dims(spec: _Spec, out: Any, tree: optree.PyTreeSpec) -> Sequence[int | None]:
    """An entry of ``out_dims`` for each flattened output."""
    bad = [
        dim
        for dim in optree.tree_leaves(spec.out_dims, is_leaf=_is_dim, none_is_leaf=True)
        if not _is_dim(dim)
    ]
    if bad or isinstance(spec.out_dims, str):
        raise ValueError(
            f"vmap({spec.name}, ..., out_dims={spec.out_dims}): `out_dims` must be an int, None "
            f"or a python collection of ints representing where in the outputs the vmapped "
            f"dimension should appear."
        )
    try:
        if isinstance(out, torch.Tensor) and not _is_dim(spec.out_dims):
            # A collection of one dim is taken for a single tensor, as torch.func takes it.
            (only,) = optree.tree_leaves(spec.out_dims, none_is_leaf=True)
            return [only]
        return _broadcast_prefix(spec.out_dims, out)
    except ValueError:
        raise ValueError(
            f"{spec.call(out=True)}: out_dims is not compatible with the structure of `outputs`. "
            f"out_dims has structure {optree.tree_structure(spec.out_dims, none_is_leaf=True)} "
            f"but outputs has structure {tree}."
        ) from None


def _result(spec: _Spec, leaf: Any, out_dim: int | None, level: BatchLevel) -> Any:
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


def _chunked(
    spec: _Spec,
    flat: Sequence[Any],
    at: Sequence[int | None],
    size: int,
    tree: InTree,
    kwargs: dict[str, Any],
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
        out = _run(spec, part, at, length, tree, kwargs, {})
        outs.append(optree.tree_flatten(out, none_is_leaf=True))
    out_tree = outs[0][1]
    dims = _match_out_dims(spec, optree.tree_unflatten(out_tree, outs[0][0]), out_tree)
    joined = [
        parts[0] if dim is None else torch.cat(parts, dim)
        for parts, dim in zip(zip(*(leaves for leaves, _ in outs), strict=True), dims, strict=True)
    ]
    return optree.tree_unflatten(out_tree, joined)


__all__ = ["Tracer", "name_of", "vmap"]
