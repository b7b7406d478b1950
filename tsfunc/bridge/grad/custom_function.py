"""``torch.autograd.Function`` on tracers: every level outside uses the class's ``backward``.

torch runs ``forward`` with grad mode off and adds one node to the graph of the tensor arguments.
For tracers this is the graph of their own level; the graphs of the values inside would be cut, as
if ``forward`` had no derivative. A call on tracers is therefore handled level by level, innermost
first: if the level records, it gets its own node, and the node's ``forward`` applies the same
function to the values inside. For a vmap this is a function with the ``forward`` and ``backward``
of the class, mapped over the examples (``mapped_function``).

After the first transform has run, ``apply_hook`` passes every call of ``Function.apply`` to
``_apply``. Calls without tracers continue to torch's own method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import Function, forward_ad

from tsfunc import hooks, pytrees
from tsfunc.bridge.grad import apply_hook
from tsfunc.bridge.grad.autograd import is_differentiable, is_perturbed, outside_graph
from tsfunc.bridge.grad.checkpoints import is_reentrant, not_reentrant
from tsfunc.bridge.grad.dual_level import can_carry_tangents
from tsfunc.bridge.grad.mapped_function import (
    MappedFunction,
    bdim_of,
    has_setup,
    results_of_rule,
    rewrap_results,
    torch_jvp,
    value_at_level,
    with_outer_tangents,
)
from tsfunc.bridge.grad.once_differentiable import call_guarded, is_once_differentiable
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer, current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, unwrap_ended
from tsfunc.bridge.tracers.checks import is_batched
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, innermost_level, refuse_escaped
from tsfunc.dispatch.messages import SPLIT
from tsfunc.dispatch.recording import run_as
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import is_expanded

_torch_vmap = Function.vmap


def torch_apply(cls: Any, *args: Any) -> Any:
    """Call torch's own method, which adds one node to the graph of the tensor arguments."""
    if cls.jvp is not torch_jvp and can_carry_tangents():
        cls = _for_tangents(cls)
    return apply_hook.call_torch_apply(cls, *args)


_FOR_TANGENTS = "__tsfunc_for_tangents__"


def _for_tangents(cls: Any) -> Any:
    """Return the class for calls whose arguments may have tangents.

    The ``jvp`` of the class sees saved tensors without their tangents. torch disables forward mode
    in it, but its tangents may have tangents of outer levels. The ``forward`` returns copies of
    expanded tensors, since torch gives a tangent the strides of its primal. A copy can have its
    batch dim in another place, so classes whose callers know the places have ``lays_out_results``.
    """
    subclass = cls.__dict__.get(_FOR_TANGENTS)
    if subclass is None:
        jvp = cls.jvp if hasattr(cls.jvp, "on_primals") else with_outer_tangents(cls.jvp)
        members = {"jvp": staticmethod(jvp)}
        if not getattr(cls, "lays_out_results", False):
            members["forward"] = staticmethod(_with_own_elements(cls.forward, has_setup(cls)))
        subclass = type(cls.__name__, (cls,), members)
        setattr(cls, _FOR_TANGENTS, subclass)
    return subclass


# The attributes that the methods of a ctx set, with tensors that may be results.
_OF_CTX = ("to_save", "saved_for_forward", "non_differentiable")


def _with_own_elements(forward: Callable[..., Any], setup: bool) -> Callable[..., Any]:
    """Return a ``forward`` whose results are not expanded, unless they are arguments.

    Args:
        setup: True if ``forward`` takes no ctx.
    """

    def run(*args: Any) -> Any:
        out = forward(*args)
        copies: dict[int, Any] = {}
        for x in out if isinstance(out, tuple) else (out,):
            expanded = is_differentiable(x) and is_expanded(x)
            if expanded and not any(x is arg for arg in args):
                with outside_graph(True):
                    copies[id(x)] = x.clone(memory_format=torch.contiguous_format)
        if not copies:
            return out
        for name in () if setup else _OF_CTX:
            tensors = getattr(args[0], name, None)
            if isinstance(tensors, tuple):
                setattr(args[0], name, tuple(copies.get(id(x), x) for x in tensors))
        if not isinstance(out, tuple):
            return copies[id(out)]
        return tuple(copies.get(id(x), x) for x in out)

    return run


def _apply(cls: Any, *args: Any) -> Any:
    """Handle a call of ``Function.apply`` whose arguments are bound to those of ``forward``."""
    if is_reentrant(cls):
        return not_reentrant(*args)
    seen = [as_seen_by_current_level(arg) for arg in args]
    trace = current_trace()
    if trace is not None:  # else torch would put a node into a graph outside of the trace
        seen = [trace.lifted_here(arg) if isinstance(arg, torch.Tensor) else arg for arg in seen]
    return _apply_seen(cls, tuple(seen))


def _apply_seen(cls: Any, args: tuple[Any, ...]) -> Any:
    level = innermost_level(args)
    if level is not None and not level.alive:
        values = unwrap_ended(args, {})
        if values is not None:
            return apply_hook.call_apply(cls, *values[0])
        refuse_escaped(cls, level)
    if is_once_differentiable(cls, args):
        return call_guarded(cls, args)
    if level is None:
        return torch_apply(cls, *args)
    if (_functorch.maybe_current_level() or 0) > level.functorch_depth:
        return torch_apply(cls, *args)
    try:
        return _apply_at_level(cls, level, args)
    except DataDependentError as error:
        if isinstance(error.__cause__, DataDependentError) or not _lacks_rule(cls, args):
            raise
        raise DataDependentError(
            f"vmap: {cls.__name__} has no vmap rule, and its forward reads values of a batched "
            f"tensor, which differ from example to example. Give {cls.__name__} a vmap "
            f"staticmethod, which gets the whole batch. (generate_vmap_rule=True serves a forward "
            f"of torch operators only.) Or {SPLIT}."
        ) from error


def _lacks_rule(cls: Any, args: Sequence[Any]) -> bool:
    """True if an argument is batched, and a user's class has no rule for it."""
    has_rule = cls.vmap is not _torch_vmap or cls.generate_vmap_rule
    is_ours = cls.__module__.partition(".")[0] == "tsfunc"
    return not has_rule and not is_ours and any(map(is_batched, args))


apply_hook.hook(_apply)
hooks.apply_seen_arguments.add(_apply_seen)


def _apply_at_level(cls: Any, level: TracerLevel, args: tuple[Any, ...]) -> Any:
    """Handle a call at one level: a node if the level records, and the outer levels inside."""
    mapped = isinstance(level, BatchLevel) and cls.vmap is not _torch_vmap
    trace = None if mapped else trace_of(args)
    if trace is not None and not getattr(cls, "mapped_by_level", False):
        return hooks.record_function.provided(cls, trace, args)
    if isinstance(level, TraceLevel):
        return torch_apply(cls, *args)
    if not mapped and not any(is_perturbed(value_at_level(arg, level), True) for arg in args):
        return torch_apply(_returning_tracers(cls) if level.autograd else cls, *args)
    if not level.autograd:
        return _apply_inside(cls, level, args)
    grad_mode = torch.is_grad_enabled()

    def forward(*tracers: Any) -> Any:
        with torch.set_grad_enabled(grad_mode), forward_ad._set_fwd_grad_enabled(True):
            return _apply_inside(cls, level, tracers)

    def forward_with_context(ctx: Any, *tracers: Any) -> Any:
        with torch.set_grad_enabled(grad_mode), forward_ad._set_fwd_grad_enabled(True):
            function = MappedFunction(cls, level, tracers, ctx.needs_input_grad)
            outs, stored = function(tracers)
        stored.save_to(ctx)
        return outs

    run_forward = forward if has_setup(cls) else forward_with_context
    members: dict[str, Any] = {"forward": staticmethod(run_forward), "mapped_by_level": True}
    if cls.jvp is not torch_jvp:
        members["jvp"] = staticmethod(with_outer_tangents(cls.jvp))
    node = type(cls.__name__, (cls,), members)
    return torch_apply(node, *[_lifted(arg, level) for arg in args])


_RETURNING_TRACERS = "__tsfunc_returning_tracers__"


def _returning_tracers(cls: Any) -> Any:
    """Return the class with results lifted to the level of its arguments.

    ``forward`` may return other tensors, which would count as results with a graph of an outer
    level. A derivative in ``forward`` may return tracers of an inner level (NOTE [values that
    outlive a vmap]), which stand for values of this level.
    """
    subclass = cls.__dict__.get(_RETURNING_TRACERS)
    if subclass is None:

        def forward(*args: Any) -> Any:
            level = innermost_level(args)
            assert level is not None
            return pytrees.tree_map(lambda x: _lifted(_shared(x, level), level), cls.forward(*args))

        subclass = type(cls.__name__, (cls,), {"forward": staticmethod(forward)})
        setattr(cls, _RETURNING_TRACERS, subclass)
    return subclass


def trace_of(args: Sequence[Any]) -> TraceLevel | None:
    """Return the trace that records a call with these arguments as one node; None if there is none.

    The trace is that of the first traced argument, at any depth, unless that records operators
    alone.
    """
    for arg in args:
        inner = innermost_value(arg, BatchTracer | GradTracer)
        if isinstance(inner, TraceTracer):
            level = inner.dispatch_level
            return None if level.for_torch else level
    return None


def _lifted(arg: Any, level: TracerLevel) -> Any:
    if isinstance(arg, torch.Tensor) and not (
        isinstance(arg, Tracer) and arg.dispatch_level is level
    ):
        return level.lift(arg)
    return arg


def _shared(x: Any, level: TracerLevel) -> Any:
    """Return the value of an unbatched tracer of a level inside of the given one."""
    while isinstance(x, BatchTracer) and x.bdim is None and x.dispatch_level.depth > level.depth:
        x = x.value
    return x


def _apply_inside(cls: Any, level: TracerLevel, args: Sequence[Any]) -> Any:
    """Apply the class to the values inside of the level's tracers, and wrap the results."""
    leaves, tree = pytrees.flatten(args)  # the arguments may be containers of tensors
    if isinstance(level, BatchLevel):
        if cls.vmap is _torch_vmap:
            needs = [isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args]
            return MappedFunction(cls, level, args, needs)(args)[0]
        if any(bdim_of(leaf, level) is not None for leaf in leaves):
            return _apply_vmap_staticmethod(cls, level, leaves, tree)
    values = [value_at_level(leaf, level) for leaf in leaves]
    with level.restored():
        outs = apply_hook.apply_seen(cls, tuple(pytrees.unflatten(tree, values)))
    results, tree = pytrees.flatten(outs)
    results = rewrap_results(results, [None] * len(results), values, leaves, level)
    return pytrees.unflatten(tree, results)


def _apply_vmap_staticmethod(cls: Any, level: BatchLevel, args: Sequence[Any], tree: Any) -> Any:
    """Call the class's ``vmap`` staticmethod with the values and their batch dims.

    Raises:
        RuntimeError: the class also has ``generate_vmap_rule=True``.
    """
    if cls.generate_vmap_rule:
        raise RuntimeError(
            f"vmap: {cls.__name__} has generate_vmap_rule=True and a vmap staticmethod: which of "
            f"them is meant can't be told. Remove one."
        )
    values = [value_at_level(arg, level) for arg in args]
    dims = pytrees.unflatten(tree, [bdim_of(arg, level) for arg in args])
    info = SimpleNamespace(batch_size=level.batch_size, randomness=level.randomness)
    called = f"{cls.__qualname__}.apply"
    with level.restored():
        returned = run_as(called, level, cls.vmap, info, dims, *pytrees.unflatten(tree, values))
    label = f"the vmap staticmethod of {cls.__name__}"
    return results_of_rule(returned, label, values, args, level)
