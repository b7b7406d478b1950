"""``vmap``: turn a function of one example into a function of a batch.

A call runs in these steps. The inputs are flattened and matched with ``in_dims`` (a plan, made
once for each structure). Each mapped tensor becomes a batched tensor of a new level. The function
runs. The results are unwrapped from their tracers, with their batch dims at ``out_dims``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import without_inference_mode
from tsfunc.bridge.mesh.spread_level import SpreadLevel
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.checks import FAILED_CHECKS, note_failed_checks, refuse_caught_checks
from tsfunc.bridge.tracers.dynamo import delegate_in_dynamo
from tsfunc.bridge.tracers.functorch import TORCH_FUNC, delegate
from tsfunc.bridge.tracers.interrupts import outermost
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.bridge.tracers.tracer import HOOKED, sync_all
from tsfunc.bridge.writing.module_state import STATE_WRITES, refuse_state_writes, restore_state
from tsfunc.dispatch.state import tls
from tsfunc.transforms.argnums import is_nested
from tsfunc.transforms.chunks import (
    Models,
    check_chunks,
    chunk_sizes_for,
    chunk_sizes_for_group,
    run_in_chunks,
)
from tsfunc.transforms.in_dims import mapped_dims, match_by_name, match_in_dims
from tsfunc.transforms.out_dims import match_out_dims, result_of
from tsfunc.transforms.ragged import match_sources, run_parts
from tsfunc.transforms.split import dense_sources
from tsfunc.transforms.tensor_collections import collections_of, returned_collections
from tsfunc.transforms.transformed import Transformed, named_as
from tsfunc.transforms.vmap_spec import InDims, OutDims, Spec
from tsfunc.user_code import folding

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

InTree = Any  # the structure of the inputs, or their number if all are tensors


def _in_dynamo(
    func: Callable[..., Any],
    in_dims: InDims = 0,
    out_dims: OutDims = 0,
    randomness: str = "error",
    *,
    chunk_size: int | Literal["auto"] | None = None,
    **other_arguments: Any,
) -> Any:
    """Return torch.func's vmap of a function; NotImplemented if it does not take the arguments."""
    if (
        other_arguments
        or isinstance(in_dims, dict)
        or randomness == "split"
        or chunk_size == "auto"
    ):
        return NotImplemented
    return TORCH_FUNC["vmap"](func, in_dims, out_dims, randomness, chunk_size=chunk_size)


@folding("vmap")
@delegate_in_dynamo(_in_dynamo)
def vmap(
    func: Callable[_Params, _Result],
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
) -> Transformed[_Params, _Result]:
    """Map a function over a dim of its inputs, by batched operators instead of a loop.

    Args:
        func: takes and returns pytrees of tensors, for one example. Containers are those of
            :mod:`tsfunc.pytrees`, including dataclasses of tensors.
        in_dims: the dim of each input that is mapped over. An int holds for all positional
            inputs. A tuple has an entry for each: an int, None (not mapped), or a pytree of these
            that is a prefix of the input. A dict has such entries by parameter names, for inputs
            passed by position or keyword; inputs without an entry are not mapped. With an int or a
            tuple, keyword arguments are not mapped. Negative dims count from the end.
        out_dims: the position of the mapped dim in each output tensor: an int or a pytree prefix
            of the outputs. None is for an output that is the same for every example. A non-tensor
            output (a number, a string, None, any object) is returned once, unchanged.
        randomness: the mode of random operators: "error", "different" (a draw for each example),
            "same" (one draw for all) or "split" (each example draws as if alone: its numbers
            follow from the seed and its index, and do not depend on the batch or the chunk; the
            call draws one key from torch's generator, even if the function draws nothing).
        chunk_size: the number of examples that are run at a time. None runs all at once; "auto"
            runs as many as fit into ``memory_budget``, which is measured on the first chunks of
            the first call with inputs of such shapes and dtypes, and kept for later calls.
        memory_budget: the most bytes that the call may have in use in addition to its inputs,
            including its results; by default half of the free memory of the inputs' device. It
            implies ``chunk_size="auto"``.
        axis_size: the number of examples; needed only if no input is mapped.
        strict: if True, an operator that would run by the slow loop is an error, in this ``vmap``
            and in those inside of it.
        data_dependent: the treatment of Python values that differ from example to example (``if``,
            ``while``, ``.item()``, the size of a ``nonzero`` or of ``x[mask]``): "error", or
            "split". "split" continues with the largest group of examples that agree, and runs
            ``func`` again for each other group, which repeats its side effects. After such a value
            was read, non-tensor outputs are per example: numbers are returned as a tensor, other
            objects as a list; an output with out_dim None is returned once. With "split",
            randomness "different" acts as "split".
        ragged: the form of an output whose size differs from example to example: "nested", a
            nested tensor (of the jagged layout, unless all nested inputs are strided); "list", a
            list of the examples' tensors, which is also used if a nested tensor can't hold them;
            or "error". A nested tensor among the inputs is mapped over its first dim.
        axis_name: the name by which collectives (``psum`` and others) exchange values among the
            examples.
        mesh_axis: an axis of a mesh (``shard_map``, ``mesh_axes``), or a tuple of axes, whose
            ranks each hold an equal part of the batch. Collectives over ``axis_name`` exchange
            values among the examples of all ranks, and with randomness "split" an example's
            numbers follow from its index among these. Similar to ``spmd_axis_name`` of
            ``jax.vmap``.

    Returns:
        A function of the batch. It can be nested, and composed with every other transform.

    Raises:
        ValueError: ``in_dims`` or ``out_dims`` do not fit, sizes differ, no input is mapped, or an
            output that is not a container holds batched tensors.
        RuntimeError: a random operator runs in "error" mode.
        DataDependentError: a batched value is used in Python control flow, or output sizes differ,
            and ``data_dependent`` or ``ragged`` does not allow it.
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

    Same as ``torch.func.vmap`` and ``jax.vmap``, except that torch.func refuses non-tensor outputs
    unless their out_dim is None.
    """
    _check_modes(randomness, data_dependent, ragged)
    chunks = check_chunks("vmap", chunk_size, memory_budget)
    _check_axis_size(axis_size)
    spec = Spec(
        func, in_dims, out_dims, randomness, chunk_size=chunks, memory_budget=memory_budget,
        axis_size=axis_size, strict=strict, data_dependent=data_dependent, ragged=ragged,
        axis_name=axis_name, mesh_axis=mesh_axis,
    )  # fmt: skip
    if (axis_name is not None or mesh_axis is not None) and (chunks is not None or spec.splits):
        _refuse_parts(spec, "chunk_size=" if chunks is not None else 'data_dependent="split"')
    call = _BatchedCalls(spec).run

    @named_as(func)
    @boundary("vmap", func, traceable=not _own_arguments(spec))
    def vmapped(*args: Any, **kwargs: Any) -> Any:
        if (other := delegate("vmap")) is not None:
            _refuse_own_arguments(spec)
            theirs = other(func, in_dims, out_dims, randomness, chunk_size=chunks)
            return theirs(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return without_inference_mode(call, args, kwargs)
        return call(args, kwargs)

    return vmapped


class _BatchedCalls:
    """Runs the calls of one vmapped function, by plans that are made once for each structure.

    An object of its own, because a ``vmapped`` that named itself would be a cycle, which keeps all
    that the function closes over until the next garbage collection.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.in_plans: dict[InTree, Sequence[int | None]] = {}
        self.out_plans: dict[Any, Sequence[int | None]] = {}
        self.memory_models: Models = {}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the function on a batch."""
        spec = self.spec
        inputs, flat, tree, dims = self._inputs(args, kwargs)
        try:
            bdims, size = mapped_dims(spec, flat, dims, inputs)
        except RuntimeError:
            if not any(map(is_nested, flat)):
                raise
            if spec.axis_name is not None or spec.mesh_axes:
                _refuse_parts(spec, "a nested tensor among the inputs")
            run = functools.partial(_run_part, spec, None, tree, kwargs)
            sizes_of = functools.partial(chunk_sizes_for_group, spec, flat)
            return run_parts(spec, *match_sources(spec, flat, dims, inputs), sizes_of, run)
        if tls.state.levels:
            flat = _in_trace(flat, bdims)
        sizes = None
        if spec.chunk_size is not None:
            rest = () if spec.by_name else kwargs
            sizes = chunk_sizes_for(spec, flat, bdims, size, rest, self.memory_models)
        if spec.splits:
            run = functools.partial(_run_part, spec, None, tree, kwargs)
            return run_parts(spec, dense_sources(flat, bdims), size, lambda _: sizes, run)
        if sizes is not None:
            run = functools.partial(_run_part, spec, bdims, tree, kwargs)
            return run_in_chunks(spec, flat, bdims, size, sizes, run)
        level: BatchLevel
        if spec.mesh_axes:
            level = SpreadLevel(size, spec.randomness, spec.label, spec.strict, spec.mesh_axes)
        else:
            level = BatchLevel(size, spec.randomness, spec.label, spec.strict)
        return _run_level(spec, level, flat, bdims, tree, kwargs, self.out_plans)

    def _inputs(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Any], InTree, Sequence[int | None]]:
        """Return the inputs, flattened, their structure, and an entry of ``in_dims`` for each."""
        spec = self.spec
        inputs: Any = (args, kwargs) if spec.by_name else args
        collections = collections_of(spec, inputs)
        if collections is not None:
            inputs, dims = collections
            return inputs, *pytrees.flatten(inputs), dims
        flat: Sequence[Any] = args
        tree: InTree = len(args)  # tensors alone are flat; their number is their whole structure
        if spec.by_name or not _are_tensors(args):
            flat, tree = pytrees.flatten(inputs)
        plan = self.in_plans.get(tree)
        if plan is None:
            named = spec.by_name
            plan = match_by_name(spec, args, kwargs) if named else match_in_dims(spec, args)
            self.in_plans[tree] = plan
        return inputs, flat, tree, plan


def _are_tensors(values: Sequence[Any]) -> bool:
    for value in values:  # noqa: SIM110 - all() of a generator takes twice as long at each call
        if not isinstance(value, torch.Tensor):
            return False
    return True


def _check_modes(randomness: str, data_dependent: str, ragged: str) -> None:
    if randomness not in ("error", "different", "same", "split"):
        raise RuntimeError(
            f"Only allowed values for randomness are 'error', 'different', or 'same'. "
            f"Got {randomness}. tsfunc also has 'split': each example draws as if alone."
        )
    if data_dependent not in ("error", "split"):
        raise ValueError(
            f"vmap: data_dependent: expected 'error' or 'split', got {data_dependent!r}."
        )
    if ragged not in ("nested", "list", "error"):
        raise ValueError(f"vmap: ragged: expected 'nested', 'list' or 'error', got {ragged!r}.")


def _check_axis_size(axis_size: Any) -> None:
    if axis_size is None:
        return
    if isinstance(axis_size, bool) or not isinstance(axis_size, int | torch.SymInt):
        raise TypeError(f"vmap: axis_size: expected None or an int, got {axis_size!r}.")
    if axis_size < 0:
        raise ValueError(f"vmap: axis_size: expected 0 or more, got {axis_size}.")


def _refuse_parts(spec: Spec, why: str) -> None:
    """Raise: a named axis needs all of its examples at a time."""
    raise ValueError(
        f"{spec.call()}: {why} runs some examples at a time, but those of the named axis "
        f"{spec.axis_name or spec.mesh_axes!r} exchange values. Remove one of the two."
    )


def _own_arguments(spec: Spec) -> list[str]:
    """Return the given arguments that torch.func's vmap does not take, as in messages."""
    extensions = {
        "a dict as in_dims": spec.by_name,
        "axis_size=": spec.sized,
        "chunk_size='auto'": spec.chunk_size == "auto",
        "strict=": spec.strict,
        "data_dependent='split'": spec.splits,
        "randomness='split'": spec.randomness == "split",
        "axis_name=": spec.axis_name is not None,
        "mesh_axis=": bool(spec.mesh_axes),
    }
    return [name for name, is_given in extensions.items() if is_given]


def _refuse_own_arguments(spec: Spec) -> None:
    """Raise for arguments that torch.func's vmap, which takes the call, does not have."""
    if used := _own_arguments(spec):
        raise RuntimeError(
            f"{spec.call()}: {' and '.join(used)} can't be served inside of a transform of "
            f"torch.func, whose own vmap runs there. Use tsfunc's transform around it too."
        )


def _in_trace(flat: Sequence[Any], bdims: Sequence[int | None]) -> Sequence[Any]:
    """Lift the mapped inputs into the current trace, if there is one.

    Operators lift their own arguments, but an operator on a batched tensor sees only its tracer.
    """
    trace = current_trace()
    if trace is None:
        return flat
    return [
        value if bdim is None else trace.lifted_here(as_seen_by_current_level(value))
        for value, bdim in zip(flat, bdims, strict=True)
    ]


def _run_part(
    spec: Spec,
    bdims: Sequence[int | None] | None,
    tree: InTree,
    kwargs: dict[str, Any],
    level: BatchLevel,
    part: Sequence[Any],
) -> Any:
    """Run some of the examples; the output plan of one part does not hold for the next.

    Without ``bdims`` the inputs are the level's tracers already.
    """
    return _run_level(spec, level, part, bdims or [None] * len(part), tree, kwargs, {})


def _run_level(
    spec: Spec,
    level: BatchLevel,
    flat: Sequence[Any],
    bdims: Sequence[int | None],
    tree: InTree,
    kwargs: dict[str, Any],
    out_plans: dict[Any, Sequence[int | None]],
) -> Any:
    """Run the function once, for all examples of the level."""
    guards = outermost.random_guards
    watching = guards.pop() if guards else watching_random()
    try:
        with level, watching:
            inputs: Any = [
                value if bdim is None else wrap(value, bdim, level)
                for value, bdim in zip(flat, bdims, strict=True)
            ]
            level.axis_name, level.outside_roots = spec.axis_name, (spec.func, flat, kwargs)
            if not isinstance(tree, int):
                inputs = pytrees.unflatten(tree, inputs)
                if spec.by_name:
                    inputs, kwargs = inputs
            out = spec.func(*inputs, **kwargs)
            if HOOKED:
                sync_all(out)
        guards.append(watching)
    except BaseException as error:
        if FAILED_CHECKS:
            note_failed_checks(error, level)
        if STATE_WRITES:
            restore_state(level)
        raise
    if FAILED_CHECKS:
        refuse_caught_checks(level)
    if STATE_WRITES:
        refuse_state_writes(level)
    if isinstance(out, torch.Tensor) and type(spec.out_dims) is int:
        return result_of(spec, out, spec.out_dims, level)
    dims: Sequence[int | None] | None = None
    collections = returned_collections(spec, out, level.batch_size)
    if collections is not None:
        out, dims = collections
    leaves, out_tree = pytrees.flatten(out)
    if dims is None and (dims := out_plans.get(out_tree)) is None:
        dims = out_plans[out_tree] = match_out_dims(spec, out, out_tree)
    results = [result_of(spec, leaf, bdim, level) for leaf, bdim in zip(leaves, dims, strict=True)]
    return pytrees.unflatten(out_tree, results)
