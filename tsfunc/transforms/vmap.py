"""``vmap``: a function of one example, made one of a batch.

The way of a call: the inputs are flattened and matched with ``in_dims`` (a plan, made once for
each structure); each tensor with a dim becomes a batched tensor of a new level; the function
runs; the results are taken out of their tracers and their batch dims put where ``out_dims`` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch

from tsfunc import pytrees
from tsfunc.bridge.batch import hot
from tsfunc.bridge.control.bodies import current_trace
from tsfunc.bridge.grad.autograd import out_of_inference
from tsfunc.bridge.mesh.spread_level import SpreadLevel
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.bridge.tracers.factories import watching_random
from tsfunc.bridge.tracers.functorch import delegate
from tsfunc.bridge.tracers.hot_calls import HOT
from tsfunc.bridge.tracers.outermost import entered
from tsfunc.bridge.tracers.tracebacks import boundary
from tsfunc.bridge.tracers.tracer import MARKED, seen_here
from tsfunc.bridge.writing.assigned import ASSIGNED, put_back_assigned, refuse_assigned
from tsfunc.bridge.writing.marked import settle_all
from tsfunc.dispatch.state import tls
from tsfunc.transforms.chunks import (
    Models,
    check_chunks,
    run_in_chunks,
    sizes_of_chunks,
    sizes_of_group,
)
from tsfunc.transforms.in_dims import is_nested, mapped, match_by_name, match_in_dims
from tsfunc.transforms.out_dims import match_out_dims, result_of
from tsfunc.transforms.ragged import match_sources, run_parts
from tsfunc.transforms.split import dense_sources
from tsfunc.transforms.tensor_collections import collections_of, returned_collections
from tsfunc.transforms.vmap_spec import InDims, OutDims, Spec

InTree = Any  # the structure of the inputs, or, where they are tensors alone, how many


@outside_dynamo
def vmap(
    func: Callable[..., Any],
    in_dims: InDims = 0,
    out_dims: OutDims = 0,
    randomness: str = "error",
    *,
    chunk_size: int | Literal["auto"] | None = None,
    memory_budget: float | None = None,
    axis_size: int | None = None,
    strict: bool = False,
    data_dependent: str = "error",
    ragged: str = "nested",
    axis_name: Hashable = None,
    mesh_axis: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Maps a function over a dim of its inputs, by batched operators instead of a loop.

    Args:
        func: takes and returns pytrees of tensors, for one example. Containers are those of
            :mod:`tsfunc.pytrees`, dataclasses of tensors among them.
        in_dims: which dim of each input is mapped over. An int holds for all positional
            inputs; a tuple has an entry for each: an int, None (not mapped), or a pytree of them
            that is a prefix of that input. A dict has such entries by the names of parameters,
            for inputs given by position or keyword; what it does not name, and with an int or a
            tuple every keyword argument, is passed on unmapped. Negative dims count from the end.
        out_dims: where the mapped dim stands in each output tensor: an int or a pytree prefix of
            the outputs. None for an output that is the same for every example. An output that is
            no tensor (a number, a string, None, any object) is returned once, as it is.
        randomness: what random operators do: "error", "different" (a draw for each example),
            "same" (one draw for all) or "split" (each example draws as if alone: its numbers
            follow from the seed and its index, and not from the batch or the chunk that it is in).
        chunk_size: how many examples are run at a time; None runs all at once, "auto" as many as
            fit into ``memory_budget``. That is measured on the first chunks of the first call
            with inputs of such shapes and types, and kept for later ones.
        memory_budget: the bytes that the call may have in use at once beside its inputs, its
            results included; by default half of what is free on the inputs' device. It implies
            ``chunk_size="auto"``.
        axis_size: how many examples there are; needed only where no input is mapped.
        strict: an operator that would run by the slow loop is an error, in this ``vmap`` and in
            those inside of it.
        data_dependent: what becomes of Python values that differ from example to example (``if``,
            ``while``, ``.item()``, the size of a ``nonzero`` or of ``x[mask]``): "error", or
            "split", which goes on with the largest group of examples that agree, and runs
            ``func`` again for each of the others; what ``func`` does outside is repeated then.
            After such a value was asked for, outputs that are no tensors are one an example:
            numbers come as a tensor, others as a list; with an out_dim of None once. Where it is
            "split", randomness "different" is served as "split".
        ragged: what comes of an output whose size differs from example to example: "nested", a
            nested tensor of the jagged layout; "list", a list of the examples' tensors, which
            also stands in where no nested tensor can be; or "error". A nested tensor among
            the inputs is mapped over its first dim.
        axis_name: a name by which collectives (``psum`` and others) exchange values among the
            examples.
        mesh_axis: an axis of a mesh (``shard_map``, ``mesh_axes``), or several, whose ranks each
            have as many examples of the batch: collectives over ``axis_name`` exchange values among
            the examples of all ranks, and with randomness "split" an example's numbers follow from
            its index among these. As ``spmd_axis_name`` of ``jax.vmap``.

    Returns:
        A function of the batch. It can be nested, and composed with every other transform.

    Raises:
        ValueError: ``in_dims`` or ``out_dims`` do not fit, sizes differ, nothing is mapped, an
            output that is no container holds batched tensors.
        RuntimeError: a random operator in "error" mode.
        DataDependentError: a value used in Python control flow, or sizes that differ, unless
            ``data_dependent`` and ``ragged`` allow for it.
        MissingRuleError: an operator has no rule and can't be looped over, or would be with
            ``strict``.

    Example:
        >>> import torch
        >>> from tsfunc import vmap
        >>> vmap(torch.dot)(torch.ones(3, 2), torch.ones(3, 2))
        tensor([2., 2., 2.])
        >>> def scaled(x, by, *, shift):
        ...     return x * by + shift
        >>> vmap(scaled, in_dims={"x": 1, "shift": 0})(torch.ones(2, 3), 2, shift=torch.arange(3))
        tensor([[2., 2.],
                [3., 3.],
                [4., 4.]])

    As ``torch.func.vmap`` and ``jax.vmap``. torch.func refuses outputs
    that are no tensors unless their out_dim is None.
    """
    if randomness not in ("error", "different", "same", "split"):
        raise RuntimeError(
            f"Only allowed values for randomness are 'error', 'different', or 'same'. "
            f"Got {randomness}. (Beside these 'split', by which each example draws as if alone.)"
        )
    if data_dependent not in ("error", "split"):
        raise ValueError(
            f"vmap: data_dependent should be 'error' or 'split'. (got {data_dependent!r})"
        )
    if ragged not in ("nested", "list", "error"):
        raise ValueError(f"vmap: ragged should be 'nested', 'list' or 'error'. (got {ragged!r})")
    chunks = check_chunks(chunk_size, memory_budget)
    _check_axis_size(axis_size)
    spec = Spec(func, in_dims, out_dims, randomness, chunks, memory_budget, axis_size, strict,
                data_dependent, ragged, axis_name, mesh_axis)  # fmt: skip
    if (axis_name is not None or mesh_axis is not None) and (chunks is not None or spec.splits):
        _refuse_parts(spec, "chunk_size=" if chunks is not None else 'data_dependent="split"')
    by_name, splits = spec.by_name, spec.splits
    plans: dict[Any, Sequence[int | None]] = {}
    out_plans: dict[Any, Sequence[int | None]] = {}
    models: Models = {}

    @boundary("vmap", func)
    def vmapped(*args: Any, **kwargs: Any) -> Any:
        if (other := delegate("vmap")) is not None:
            _refuse_own_arguments(spec)
            theirs = other(func, in_dims, out_dims, randomness, chunk_size=chunks)
            return theirs(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return out_of_inference(vmapped, *args, **kwargs)
        flat: Sequence[Any]
        dims: Sequence[int | None] | None = None
        given = (args, kwargs) if by_name else args
        collections = collections_of(spec, given)
        if collections is not None:
            given, dims = collections
        if by_name or dims is not None:
            flat, tree = pytrees.flatten(given)
        else:
            for arg in args:
                if not isinstance(arg, torch.Tensor):
                    flat, tree = pytrees.flatten(args)
                    break
            else:
                # Tensors alone are flat already; their number is all there is to their structure.
                flat, tree = args, len(args)
        if dims is None and (dims := plans.get(tree)) is None:
            matched = match_by_name(spec, args, kwargs) if by_name else match_in_dims(spec, args)
            dims = plans[tree] = matched
        try:
            at, size = mapped(spec, flat, dims, given)
        except RuntimeError:
            if not any(map(is_nested, flat)):
                raise
            if axis_name is not None or spec.mesh_axes:
                _refuse_parts(spec, "a nested tensor among the inputs")
            run = functools.partial(_run_part, spec, None, tree, kwargs)
            sizes_of = functools.partial(sizes_of_group, spec, flat)
            return run_parts(spec, *match_sources(spec, flat, dims, given), sizes_of, run)
        if tls.state.levels:
            flat = _in_trace(flat, at)
        sizes = None
        if chunks is not None:
            rest = () if by_name else kwargs
            sizes = sizes_of_chunks(spec, flat, at, size, rest, models)
        if splits:
            run = functools.partial(_run_part, spec, None, tree, kwargs)
            return run_parts(spec, dense_sources(flat, at), size, lambda _: sizes, run)
        if sizes is not None:
            run = functools.partial(_run_part, spec, at, tree, kwargs)
            return run_in_chunks(spec, flat, at, size, sizes, run)
        if spec.mesh_axes:
            level: BatchLevel = SpreadLevel(size, randomness, spec.label, strict, spec.mesh_axes)
        else:
            level = BatchLevel(size, randomness, spec.label, strict)
        return _run(spec, level, flat, at, tree, kwargs, out_plans)

    # ``wraps`` also of callables without a name or docstring, as modules and partials are.
    return functools.wraps(func)(vmapped) if hasattr(func, "__name__") else vmapped


def _check_axis_size(axis_size: Any) -> None:
    if axis_size is None:
        return
    if isinstance(axis_size, bool) or not isinstance(axis_size, int | torch.SymInt):
        raise TypeError(f"vmap: axis_size should be None or an int. (got {axis_size!r})")
    if axis_size < 0:
        raise ValueError(f"vmap: axis_size can't be negative. (got {axis_size})")


def _refuse_parts(spec: Spec, why: str) -> None:
    """An axis has to have all of its examples at a time."""
    raise ValueError(
        f"{spec.call()}: {why} runs some examples at a time, but those of the named axis "
        f"{spec.axis_name or spec.mesh_axes!r} are to exchange values. Leave one of the two out."
    )


def _refuse_own_arguments(spec: Spec) -> None:
    """Where a transform of torch.func is the innermost, its vmap takes the call."""
    own = {
        "a dict as in_dims": spec.by_name,
        "axis_size=": spec.sized,
        "chunk_size='auto'": spec.chunk_size == "auto",
        "strict=": spec.strict,
        "data_dependent='split'": spec.splits,
        "randomness='split'": spec.randomness == "split",
        "axis_name=": spec.axis_name is not None,
        "mesh_axis=": bool(spec.mesh_axes),
    }
    used = [name for name, given in own.items() if given]
    if used:
        raise RuntimeError(
            f"{spec.call()}: {' and '.join(used)} can't be served inside of a transform of "
            f"torch.func, whose own vmap runs there. Use tsfunc's transform around it too."
        )


def _in_trace(flat: Sequence[Any], at: Sequence[int | None]) -> Sequence[Any]:
    """The inputs, where they are traced: of what is mapped, tensors from outside are lifted.

    What calls are given is lifted as they are made, but those of a batched tensor see its tracer.
    """
    trace = current_trace()
    if trace is None:
        return flat
    return [
        value if dim is None else trace.lifted_here(seen_here(value))
        for value, dim in zip(flat, at, strict=True)
    ]


def _run_part(
    spec: Spec,
    at: Sequence[int | None] | None,
    tree: InTree,
    kwargs: dict[str, Any],
    level: BatchLevel,
    part: Sequence[Any],
) -> Any:
    """Some of the examples; what their results look like is no plan for the next ones.

    Without ``at`` the inputs are the level's tracers already.
    """
    return _run(spec, level, part, at or [None] * len(part), tree, kwargs, {})


def _run(
    spec: Spec,
    level: BatchLevel,
    flat: Sequence[Any],
    at: Sequence[int | None],
    tree: InTree,
    kwargs: dict[str, Any],
    out_plans: dict[Any, Sequence[int | None]],
) -> Any:
    """One run of the function, for all examples of the level."""
    if not HOT:
        hot.fill()
    guards = entered.random_guards
    watching = guards.pop() if guards else watching_random()
    try:
        with level, watching:
            inputs: Any = [
                value if dim is None else wrap(value, dim, level, value.storage_offset())
                for value, dim in zip(flat, at, strict=True)
            ]
            level.axis_name = spec.axis_name
            if not isinstance(tree, int):
                inputs = pytrees.unflatten(tree, inputs)
                if spec.by_name:
                    inputs, kwargs = inputs
            out = spec.func(*inputs, **kwargs)
            if MARKED:
                settle_all(out)
        guards.append(watching)
    except BaseException:
        if ASSIGNED:
            put_back_assigned(level)
        raise
    if ASSIGNED:
        refuse_assigned(level)
    if isinstance(out, torch.Tensor) and type(spec.out_dims) is int:
        return result_of(spec, out, spec.out_dims, level)
    dims: Sequence[int | None] | None = None
    collections = returned_collections(spec, out, level.batch_size)
    if collections is not None:
        out, dims = collections
    leaves, out_tree = pytrees.flatten(out)
    if dims is None and (dims := out_plans.get(out_tree)) is None:
        dims = out_plans[out_tree] = match_out_dims(spec, out, out_tree)
    results = [result_of(spec, leaf, dim, level) for leaf, dim in zip(leaves, dims, strict=True)]
    return pytrees.unflatten(out_tree, results)
