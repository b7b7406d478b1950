"""An ``autograd.Function`` of values, made from a Function that is called on tracers.

The methods ``forward``, ``backward`` and ``jvp`` of the result run the methods of the class on
tracers of a new level. The values' own graph gets a node with the derivative that the class
defines, instead of the operations that ``forward`` would record.

NOTE [tangents of outer levels]
C++ runs a ``jvp`` method with forward mode switched off, because the tensors' own tangents would be
propagated a second time. A ``jvp`` method that switches forward mode on again, by a jvp of its own
or by a checkpoint, must not see these tangents at all, so its tensors are stripped of them. The
tangents of outer levels, which belong to the values inside of tracers, must be propagated, so
forward mode is on for tracers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Function, forward_ad

from tsfunc import pytrees
from tsfunc.bridge.grad.apply_hook import apply_seen
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.grad.dual_level import can_carry_tangents
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import State, outside_all_levels, tls, using
from tsfunc.ops.dims import expand_at

_torch_setup_context = Function.setup_context
torch_jvp = Function.jvp


def has_setup(cls: Any) -> bool:
    """True if the class has ``setup_context``, so that ``forward`` takes no ctx."""
    return cls.setup_context is not _torch_setup_context


def value_at_level(arg: Any, level: TracerLevel) -> Any:
    """Return the value of a tracer of the level; other arguments are returned unchanged."""
    is_of_level = isinstance(arg, BatchTracer | GradTracer) and arg.dispatch_level is level
    return arg.value if is_of_level else arg


def bdim_of(arg: Any, level: TracerLevel) -> int | None:
    """Return the batch dim of a tracer of the level, or None."""
    return arg.bdim if isinstance(arg, BatchTracer) and arg.dispatch_level is level else None


def rewrap_results(
    results: Sequence[Any],
    bdims: Sequence[int | None],
    values: Sequence[Any],
    args: Sequence[Any],
    level: TracerLevel,
) -> list[Any]:
    """Return tracers for results; a result that is an argument's own value is that argument.

    A result that a vmap does not batch is returned itself, and may outlive the vmap, except where
    autograd records at the level: a node has results of one level.
    """

    def tracer(result: Any, bdim: int | None) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        for value, arg in zip(values, args, strict=True):
            if value is result and bdim_of(arg, level) == bdim:
                return arg
        if not isinstance(level, BatchLevel):
            return level.lift(result)
        return result if bdim is None and not level.autograd else wrap(result, bdim, level)

    return [tracer(result, bdim) for result, bdim in zip(results, bdims, strict=True)]


def results_of_rule(
    returned: Any, label: str, values: Sequence[Any], args: Sequence[Any], level: TracerLevel
) -> Any:
    """Return tracers for the results of a rule in torch's form, ``(output, out_dims)``.

    Args:
        values: the values that the rule got for ``args``.

    Raises:
        RuntimeError: the results are not a pair, or ``out_dims`` does not fit the output.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        got = (
            f"{len(returned)} of them"
            if isinstance(returned, tuple)
            else f"a {type(returned).__name__}"
        )
        raise RuntimeError(
            f"vmap: {label} is expected to have two returns, (output, out_dims), got {got}."
        )
    output, out_dims = returned
    leaves, tree = pytrees.flatten(output)
    try:
        bdims = pytrees.broadcast_prefix(out_dims, output, lambda bdim: bdim is None)
    except ValueError as error:
        raise RuntimeError(
            f"vmap: {label} returned an incompatible (output, out_dims): out_dims {out_dims} are "
            f"not a prefix of the structure of the output, {pytrees.structure_text(tree)}."
        ) from error
    return pytrees.unflatten(tree, rewrap_results(leaves, bdims, values, args, level))


def detach_alias(result: Any, operands: Sequence[Any]) -> Any:
    """Return a result of a ``forward``, detached if it is an argument or a view.

    torch makes the tangent of a view a view as well.
    """
    with DisableTorchFunctionSubclass():
        fresh = not result._is_view() and not any(result is x for x in operands)
    return result if fresh else result.detach()


class FunctionContext:
    """The ``ctx`` that the methods of the class get."""

    def __init__(self, needs_input_grad: Sequence[bool] = ()) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()
        self.saved_for_forward: tuple[Any, ...] | None = None
        self.dirty: tuple[Any, ...] = ()
        self.not_differentiable: tuple[Any, ...] = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        self.saved_for_forward = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.not_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value

    def seen_by(self, method: str) -> FunctionContext:
        """Return the context for ``backward`` or ``jvp``, with the tensors saved for it."""
        if method == "jvp" and self.saved_for_forward is not None:
            self.saved_tensors = self.saved_for_forward
        return self

    def save_to(self, ctx: Any) -> None:
        """Copy the saved tensors and settings to torch's ctx."""
        attributes = dict(vars(self))
        saved, forward = attributes.pop("saved_tensors"), attributes.pop("saved_for_forward")
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*(saved if forward is None else forward))
        ctx.mark_dirty(*attributes.pop("dirty"))
        ctx.mark_non_differentiable(*attributes.pop("not_differentiable"))
        ctx.set_materialize_grads(attributes.pop("materialize"))
        del attributes["needs_input_grad"]
        for name, value in attributes.items():
            setattr(ctx, name, value)


class MappedFunction:
    """A Function of values whose ``forward`` runs a class on tracers of a level.

    A call takes the tracers, and returns the results and the ctx that the class filled, both at the
    level of the tracers.

    NOTE [results of a mapped function]
    If one result is batched, or an argument with a differentiable dtype, all results with
    differentiable dtypes are batched. The cotangent of an unbatched result would be the sum over
    the examples, and each example would get the whole sum. The value of such a result is the same
    for all examples, but its derivative by the class's ``backward`` may differ.

    Attributes:
        bdims: the batch dim of each argument, or None.
        shapes: the shape of each argument for one example.
        results: the number of results; stored tensors that are not results come after them.
        out_dims: the batch dim of each result and stored tensor, or None.
        tree: the structure of the results.
        state: the contents of the ctx, each leaf as ("input", i), ("result", i) or
            ("other", value).
    """

    def __init__(
        self, cls: Any, outer: TracerLevel, args: Sequence[Any], needs_input_grad: Sequence[bool]
    ) -> None:
        self.cls, self.outer, self.needs = cls, outer, tuple(needs_input_grad)
        self.bdims = [bdim_of(arg, outer) for arg in args]
        self.shapes = [arg.shape if isinstance(arg, torch.Tensor) else None for arg in args]
        self.results = 0
        self.out_dims: list[int | None] = []
        self.tree: Any = None
        self.state: list[tuple[str, Any]] = []
        self.state_tree: Any = None

    def __call__(self, args: Sequence[Any]) -> tuple[Any, FunctionContext]:
        level = self.outer
        with level.restored():
            values = _distinct_values(args, level)
            results = apply_seen(_function_of(self), tuple(values))
        results = rewrap_results(results, self.out_dims, values, args, level)
        stored = self.restored(self.stored_tensors(args, results))
        return pytrees.unflatten(self.tree, results[: self.results]), stored

    def run(self, call: Callable[..., Any], values: Sequence[Any], bdims: Sequence[Any]) -> Any:
        """Call a function with a new level and tracers of it for the values."""
        outer = self.outer
        with using(_state_outside(outer)):
            if not isinstance(outer, BatchLevel):
                return call(outer, list(values))
            level = outer.duplicate(f"vmap of {self.cls.__name__}")
            level.outside_roots = call, values
            with level, watching_random():
                return call(level, _wrapped(values, bdims, level))

    def forward(self, *values: Any) -> Any:
        """Return the results, followed by the other tensors stored on the ctx."""
        cls, ctx = self.cls, FunctionContext(self.needs)

        def call(level: TracerLevel, inputs: Sequence[Any]) -> Any:
            if has_setup(cls):
                out = cls.forward(*inputs)
                cls.setup_context(ctx, tuple(inputs), out)
            else:
                out = cls.forward(ctx, *inputs)
            tracers, self.tree = pytrees.flatten(out)
            self.results = len(tracers)
            self._keep(ctx, level, values, tracers)
            self.out_dims = [bdim_of(x, level) for x in tracers]
            written = [value_at_level(x, level) for x in ctx.dirty]
            results = [value_at_level(x, level) for x in tracers]
            for i, x in enumerate(results[: self.results]):
                if isinstance(x, torch.Tensor) and not any(x is one for one in written):
                    results[i] = detach_alias(x, values)
            by = any(
                bdim is not None and is_differentiable(x)
                for x, bdim in zip(values, self.bdims, strict=True)
            )
            if isinstance(level, BatchLevel) and (by or self.batched):
                self._batch_all(results, level.batch_size)
            return tuple(results)

        return self.run(call, values, self.bdims)

    def _keep(
        self, ctx: FunctionContext, level: TracerLevel, values: Sequence[Any], results: list[Any]
    ) -> None:
        """Record the ctx; its tensors that are neither inputs nor results join the results."""
        stored, self.state_tree = pytrees.flatten(vars(ctx))
        result_values = [value_at_level(x, level) for x in results]
        self.state = []
        for leaf in stored:
            value = value_at_level(leaf, level)
            position = _place(value, values, result_values)
            if position is None and isinstance(value, torch.Tensor):
                position = ("result", len(results))
                results.append(leaf)
                result_values.append(value)
            self.state.append(position or ("other", value))

    def _batch_all(self, results: list[Any], size: int) -> None:
        """Batch all results with differentiable dtypes: see NOTE [results of a mapped function]."""
        for i in range(self.results):
            x = results[i]
            if self.out_dims[i] is None and is_differentiable(x):
                every = x.expand(size, *x.shape)
                # A tangent gets the strides of its result, which fails for an expanded one.
                results[i] = every.clone() if can_carry_tangents() else every
                self.out_dims[i] = 0

    @property
    def batched(self) -> bool:
        """True if any result is batched."""
        return any(bdim is not None for bdim in self.out_dims[: self.results])

    def stored_tensors(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Return the tensors stored on the ctx, from a call's inputs and results."""
        tensors_by_kind = {"input": inputs, "result": results}
        return [tensors_by_kind[kind][where] for kind, where in self.state if kind != "other"]

    def restored(self, tensors: Sequence[Any]) -> FunctionContext:
        """Return the ctx that the class filled, with these tensors."""
        remaining = iter(tensors)
        leaves = [where if kind == "other" else next(remaining) for kind, where in self.state]
        ctx = FunctionContext()
        vars(ctx).update(pytrees.unflatten(self.state_tree, leaves))
        return ctx

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        tensors = self.stored_tensors(inputs, output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        stored = self.restored(tensors)
        ctx.mark_dirty(*stored.dirty)
        others = [x for x in output[self.results :] if isinstance(x, torch.Tensor)]
        ctx.mark_non_differentiable(*stored.not_differentiable, *others)
        ctx.set_materialize_grads(stored.materialize)

    def derivative(
        self, method: str, ctx: Any, args: Sequence[Any], bdims: Sequence[Any], moved: Any
    ) -> list[Any]:
        """Run ``backward`` or ``jvp`` of the class; ``moved(x, i, level)`` unwraps result ``i``."""
        stored = ctx.saved_tensors  # read outside of the level: may rerun a checkpoint

        def call(level: TracerLevel, inputs: Sequence[Any]) -> Any:
            bdims = self.stored_tensors(self.bdims, self.out_dims)
            saved = _wrapped(stored, bdims, level) if isinstance(level, BatchLevel) else stored
            context = self.restored(saved).seen_by(method)
            context.needs_input_grad = tuple(ctx.needs_input_grad)
            derivatives = getattr(self.cls, method)(context, *inputs)
            derivatives = derivatives if isinstance(derivatives, tuple) else (derivatives,)
            return [moved(x, i, level) for i, x in enumerate(derivatives)]

        return self.run(call, args, bdims)

    @restoring_thread_state
    def backward(self, ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Run the class's ``backward``; each cotangent has the batch dim of its argument."""
        count = self.results
        return tuple(
            self.derivative(
                "backward", ctx, cotangents[:count], self.out_dims[:count], self._cotangent
            )
        )

    def _cotangent(self, x: Any, i: int, level: TracerLevel) -> Any:
        """Reduce a cotangent to the shape and batch dim of its argument, as the engine does."""
        if not isinstance(x, torch.Tensor):
            return x
        shape = self.shapes[i]
        if shape is not None and x.shape != shape:
            x = x.sum_to_size(shape)
        value, bdim, to = value_at_level(x, level), bdim_of(x, level), self.bdims[i]
        if to is None:
            if bdim is not None:
                return value.sum(bdim)
            return value * _batch_size(level) if self.batched else value
        return expand_at(value, bdim, _batch_size(level), to)

    def jvp(self, ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """Run the class's ``jvp``; each tangent has the batch dim of its result."""
        tangents_out = self.derivative("jvp", ctx, tangents, self.bdims, self._tangent)
        return (*tangents_out, *[None] * (len(self.out_dims) - self.results))

    def _tangent(self, x: Any, i: int, level: TracerLevel) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        value, bdim, to = value_at_level(x, level), bdim_of(x, level), self.out_dims[i]
        return value if to is None else expand_at(value, bdim, _batch_size(level), to)


def _state_outside(level: TracerLevel) -> State:
    """Return the state outside of a level, for a call on the values of its tracers.

    A derivative may run inside of levels that began after the level ended: those have the
    cotangents' tracers. In a call by another mapped function, the values are tracers of that
    function's duplicate level (``BatchLevel.duplicate``), in the place of that level itself.
    """
    now = tls.state
    if not level.alive and now.levels:
        return now
    outside = level.outer.levels
    originals = [_original(tensor) for tensor in outside]
    for active in reversed(now.levels):
        duplicate = _is_duplicate(active) and active not in outside
        if duplicate and active.depth < level.depth and _original(active) in originals:
            return active.inner
    return level.outer


def _is_duplicate(level: Level) -> bool:
    return _original(level) is not level


def _original(level: Level) -> Level:
    return level.original if isinstance(level, BatchLevel) else level


def _wrapped(values: Sequence[Any], bdims: Sequence[Any], level: BatchLevel) -> list[Any]:
    return [
        wrap(value, bdim, level) if bdim is not None and isinstance(value, torch.Tensor) else value
        for value, bdim in zip(values, bdims, strict=True)
    ]


def _batch_size(level: TracerLevel) -> Any:
    assert isinstance(level, BatchLevel)
    return level.batch_size


def on_primals(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``jvp`` method that sees no tangents except its arguments.

    The method runs outside of the levels that none of the tangents belong to. Otherwise transforms
    that the method calls could return tracers of an unrelated vmap around the call.
    """

    def run(ctx: Any, *tangents: Any) -> Any:
        with _inside_level_of(tangents):
            return jvp(_Primals(ctx), *tangents)

    run.on_primals = True  # type: ignore[attr-defined]
    return run


def _inside_level_of(values: Sequence[Any]) -> AbstractContextManager[None]:
    """Context manager: no level inside of the innermost level of some values is active.

    The duplicate levels of mapped functions that are running stay active.
    """
    levels = tls.state.levels
    levels_of_values = [x.dispatch_level for x in values if isinstance(x, Tracer)]
    duplicates = [level for level in levels if _is_duplicate(level)]
    depth = max((level.depth for level in (*levels_of_values, *duplicates)), default=-1)
    if not any(level.depth > depth for level in levels):
        return nullcontext()
    last: Any = next((level for level in levels if level.depth == depth), None)
    return outside_all_levels() if last is None else using(last.inner)


def with_outer_tangents(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``jvp`` method for tracers, which propagates the tangents of outer levels."""

    def run(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(ctx, *tangents)

    return on_primals(run)


class _Primals:
    """A ctx whose tensors are returned without tangents."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ctx, name)
        if name == "saved_tensors":
            return tuple(_primal(x) for x in attribute)
        return _primal(attribute)


def _primal(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with DisableTorchFunctionSubclass():
        return forward_ad.unpack_dual(value).primal


def _function_of(mapped: MappedFunction) -> Any:
    """Return the ``autograd.Function`` of a mapped class."""
    members: dict[str, Any] = {
        "forward": staticmethod(mapped.forward),
        "setup_context": staticmethod(mapped.setup_context),
        "backward": staticmethod(mapped.backward),
    }
    if mapped.cls.jvp is not torch_jvp:
        members["jvp"] = staticmethod(with_outer_tangents(mapped.jvp))
    members["mapped_by_level"] = True
    return type(mapped.cls.__name__, (Function,), members)


def _distinct_values(args: Sequence[Any], level: TracerLevel) -> list[Any]:
    """Return the values of arguments; arguments that are different objects have different values.

    Two tracers, or a tracer and a plain tensor, can have one value with two batch dims, of which a
    level differentiates by one alone. A stored tensor is found again by its identity (``_place``).
    """
    values = [value_at_level(arg, level) for arg in args]
    first: dict[int, Any] = {}
    for i, (value, arg) in enumerate(zip(values, args, strict=True)):
        if isinstance(value, torch.Tensor) and first.setdefault(id(value), arg) is not arg:
            values[i] = value.view_as(value)
    return values


def _place(value: Any, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[str, int] | None:
    """Return the position of a stored tensor among the inputs and results, or None."""
    if isinstance(value, torch.Tensor):
        for kind, tensors in (("input", inputs), ("result", results)):
            for i, tensor in enumerate(tensors):
                if tensor is value:
                    return kind, i
    return None
