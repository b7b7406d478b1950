"""The handlers of batched tensors: they run a call by its plan, or leave it to the table.

NOTE [plans of operators]
``Operator.call`` finds the kernel of the highest bit of the key set. This is the kernel of the
Batch column, which runs a batching rule, if three things hold: all tracers of the call belong to
one vmap's level, no key is included or excluded by hand, and no kernel is registered for the
operator. The plan runs the rule without the steps between, under the state that the level captured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _ForceDispatchKeyGuard,
    _functorch,
    _set_grad_enabled,
)
from torch._ops import OpOverload

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.batch_tracer import (
    NO_TENSORS,
    TRACERS,
    BatchLevel,
    BatchTracer,
    rewrap,
    unwrap_args,
    unwrap_ended,
    update_history,
    wrap_in_python,
    wrap_result,
)
from tsfunc.bridge.tracers.boundaries import keep_call_of_example
from tsfunc.bridge.tracers.call_plans import (
    FUNCTION_PLANS,
    CallPlan,
    CallPlanTable,
    PlanStep,
    arguments_of,
    bdims_at_call,
    plans_of_function,
    plans_of_operator,
)
from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.operators import (
    CALL_ERRORS,
    TorchOperator,
    operator_of,
    operators_by_id,
    watch_direct_rules,
)
from tsfunc.bridge.tracers.parsing import Form
from tsfunc.bridge.tracers.plan_conditions import goes_to_torch
from tsfunc.bridge.tracers.python_functions import LOSES_ARGUMENTS, handle_with_all_arguments
from tsfunc.bridge.tracers.recipes import record_recipes
from tsfunc.bridge.tracers.torch_state import (
    TorchState,
    any_autocast,
    below_autograd,
    is_autocasting,
    records_on_values,
    without_autograd,
)
from tsfunc.bridge.tracers.tracer import (
    NO_KWARGS,
    SlottedTracer,
    TracerLevel,
    call_below_function,
    function_handler,
)
from tsfunc.dispatch.state import State, tls
from tsfunc.errors import EscapedTracerError
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.ops.splitting import BatchChanged
from tsfunc.user_code import fold_traceback

maybe_functorch_level = _functorch.maybe_current_level
is_grad_enabled = torch.is_grad_enabled
is_inference_mode_enabled = torch.is_inference_mode_enabled
_Tensor = torch.Tensor
_strided = torch.strided
_shape_of = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_INT = frozenset({int})

_UNKNOWN: Any = object()
_TABLE, _DIRECT, _SAME_RANK, _BROADCAST, _UNBATCHED, _COMPOSITE, _BELOW_AUTOGRAD = (
    PlanStep.TABLE, PlanStep.DIRECT, PlanStep.SAME_RANK, PlanStep.BROADCAST, PlanStep.UNBATCHED,
    PlanStep.COMPOSITE, PlanStep.BELOW_AUTOGRAD,
)  # fmt: skip


def _is_users_error(level: BatchLevel, values: Sequence[Any]) -> bool:
    """True if an error is the user's, and must be raised at once.

    A second attempt would call hooks again. Empty batches (NOTE [no examples]) and sparse batches
    have their own rules, and are tried again.
    """
    return level.batch_size != 0 and not any(
        isinstance(value, _Tensor) and value.layout is not _strided for value in values
    )


def _plans_of_overload(
    overload: Any, args: Args, kwargs: Mapping[str, Any]
) -> CallPlanTable | None:
    """Return the plans of an overload that a rule of an inner level, or a mode, calls."""
    op = operator_of(overload)
    if op.direct_rule is None:
        return None
    if not op.inplace and op.written_by_call(args):
        return None  # a written tensor becomes a tracer first (``writes``)
    return plans_of_operator(op) if not kwargs or op.keywords.issuperset(kwargs) else None


def call_by_plan(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a call of the function handler by its plan; NotImplemented leaves it to the table."""
    overload = type(func) is OpOverload
    plans: Any = (
        _plans_of_overload(func, args, kwargs) if overload else FUNCTION_PLANS.get(func, _UNKNOWN)
    )
    if plans is _UNKNOWN:
        plans = plans_of_function(func)
    if plans is None or below_autograd():
        return NotImplemented  # a mode calls it: the dispatch handler restores the keys
    values: Sequence[Any]
    if kwargs:
        level, values, kinds = unwrap_args((*args, *kwargs.values()))
        key = (*kinds, *kwargs)
    else:
        level, values, kinds = unwrap_args(args)
        key = tuple(kinds)
    if level is None or not level.alive or level.restores or maybe_functorch_level() is not None:
        return NotImplemented
    state = tls.state
    if overload and not state.mask & level.key_bit:
        return NotImplemented  # the level's own kernel calls outwards
    if level.autograd:
        plan = plans.recorded.get(key) or plans.make_recorded(func, args, kwargs, kinds, key)
        if plan.training is not None and values[plan.training] is not False:
            return NotImplemented
        recordable = state.remap_args is None and _is_recordable(plan, level, args, values)
        return _call_recorded(func, types, args, kwargs) if recordable else NotImplemented
    if not state.plain:
        return NotImplemented
    plan = plans.plans.get(key) or plans.make(func, args, kwargs, kinds, key)
    step = plan.step
    if plan.training is not None and values[plan.training] is not False:
        return NotImplemented
    if state.remap_args is not None and step is not _TABLE:
        remapped = state.remap_args(func, args, kwargs)
        if remapped is not None:
            out = call_by_plan(func, types, *remapped)
            return func(*remapped[0], **remapped[1]) if out is NotImplemented else out
    if plan.writes and level.splitter is not None:
        return NotImplemented  # the table prepares the write: NOTE [memory of finished examples]
    direct = step is _DIRECT or ((step is _SAME_RANK or step is _BROADCAST) and _fits(plan, values))
    bdims = plan.bdims
    if not direct:
        if step is _TABLE or step is _UNBATCHED or any_autocast():
            return NotImplemented  # autocast kernels come first: NOTE [autocast and rules]
        if step is _COMPOSITE:
            return call_below_function(func, types, args, kwargs)
        if step is _BELOW_AUTOGRAD:
            if not goes_to_torch(plan, level, (*args, *kwargs.values()), values):
                return NotImplemented
            with without_autograd():
                return call_below_function(func, types, args, kwargs)
        if bdims is None:
            bdims = bdims_at_call(plan, kinds, values, len(args))
    if kwargs or plan.form is not None:
        arguments = arguments_of(plan, values, len(args), kwargs)
        if arguments is None:
            return NotImplemented
        values, kwargs = arguments
    tls.state = level.outer
    try:
        out = _compute(plan, level, direct, values, kwargs, bdims)
    finally:
        tls.state = state
    return _wrap_results(plan, level, direct, args, kwargs, out)


def _call_recorded(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call torch, which records the call; NotImplemented if the function's own rule may differ.

    A rule that leaves calls to torch has a result if torch has none: an emulated view.
    """
    try:
        return call_below_function(func, types, args, kwargs)
    except RuntimeError:
        if func not in METHODS:
            raise
        return NotImplemented


def _fits(plan: CallPlan, values: Sequence[Any]) -> bool:
    """True if the operands of a ``SAME_RANK`` or ``BROADCAST`` plan need no alignment."""
    x, y = values[:2]
    if plan.step is _SAME_RANK:
        return bool(x.dim() == y.dim())
    if not plan.first:
        x, y = y, x
    # The unbatched operand has no dim to the left of the batch dim.
    return bool(1 < x.dim() > y.dim() + plan.dim)


def _compute(
    plan: CallPlan, level: BatchLevel, direct: bool, values: Sequence[Any],
    kwargs: Mapping[str, Any], bdims: Sequence[Any] | None,
) -> Any:  # fmt: skip
    """Return a plan's result for the values; NotImplemented leaves the call to the table.

    Args:
        direct: True if the plan's function is called on the values.
        values, kwargs: the arguments of the function or the rule.
    """
    if plan.writes:
        update_history(values[0])
    try:
        if direct:
            return plan.function(*values, **kwargs) if kwargs else plan.function(*values)
        if plan.step is _UNBATCHED:
            return plan.function(*values, **kwargs), None
        # A form omits trailing arguments that equal the defaults.
        return plan.rule(plan.target, level, bdims[: len(values)], values, kwargs)  # type: ignore[misc,index]
    except BatchChanged:
        return NotImplemented  # the table brings the tracers to the rule again
    except CALL_ERRORS:
        if _is_users_error(level, values):
            raise
        return NotImplemented


def _is_recordable(
    plan: CallPlan, level: BatchLevel, args: Sequence[Any], values: Sequence[Any]
) -> bool:
    """True if torch, which a plan calls, records the call at the level and no outer one."""
    if plan.step is _TABLE or is_inference_mode_enabled():
        return False
    if plan.step is _COMPOSITE and any_autocast():
        return False  # NOTE [autocast and rules]
    return goes_to_torch(plan, level, args, values)


def _wrap_results(
    plan: CallPlan, level: BatchLevel, direct: bool, args: Args, kwargs: Kwargs,
    out: Any,
) -> Any:  # fmt: skip
    """Return the results of a call whose plan has computed ``out``, as tracers of the level."""
    if out is NotImplemented:
        return out
    if direct and plan.writes:
        return args[0] if isinstance(out, _Tensor) else NotImplemented
    if direct:
        return wrap_result(out, plan.dim, level, args)
    values, bdims = out
    if plan.writes:
        return args[0]
    if plan.operator is None or type(values) is _Tensor:
        return wrap_result(values, bdims, level, args)
    results = rewrap(plan.operator, level, args, kwargs, values, bdims)
    return results if plan.form is None else plan.form.result_of(results)


def dispatch_by_plan(op: TorchOperator, args: Args, kwargs: Kwargs) -> Any:
    """Run a call of the dispatch handler by its plan; NotImplemented leaves it to the table."""
    values: Sequence[Any]
    if kwargs:
        level, values, kinds = unwrap_args((*args, *kwargs.values()))
        key = (*kinds, *kwargs)
        values = values[: len(args)]
    else:
        level, values, kinds = unwrap_args(args)
        key = tuple(kinds)
    if level is None or not level.alive or level.restores:
        return NotImplemented
    if op.composite and is_autocasting():
        return NotImplemented  # the guard of the level handles it: NOTE [autocast and rules]
    state = tls.state
    if not state.plain or not state.mask & level.key_bit:
        return NotImplemented
    grad = is_grad_enabled()
    if not grad and is_inference_mode_enabled():
        return NotImplemented  # the guard of the level handles it
    captured = level.torch_state
    if captured.in_modes:
        return NotImplemented  # the guard of the level handles modes
    plans = op.plans or plans_of_operator(op)
    plan = plans.plans.get(key) or plans.make(op.overload, args, kwargs, kinds, key)
    step = plan.step
    if step is _TABLE or (plan.writes and level.splitter is not None) or level.detaches_operands:
        return NotImplemented
    bdims = plan.bdims
    if bdims is None:
        bdims = bdims_at_call(plan, kinds[: len(args)], values, len(args))
    guards = captured.guards  # free guards; other threads may pop them meanwhile
    try:
        guard = guards.pop()
    except IndexError:
        guard = _ForceDispatchKeyGuard(captured.include, captured.exclude)
    guard.__enter__()
    want = records_on_values(captured)
    if want is not grad:
        _set_grad_enabled(want)
    tls.state = level.kernel_state(level.key_index)
    try:
        direct = step is _DIRECT or (
            (step is _SAME_RANK or step is _BROADCAST) and _fits(plan, values)
        )
        out = _compute(plan, level, direct, values, kwargs, bdims)
    finally:
        tls.state = state
        if want is not grad:
            _set_grad_enabled(grad)
        guard.__exit__(None, None, None)
        guards.append(guard)
    return _wrap_results(plan, level, direct, args, kwargs, out)


# NOTE [queries of autograd]
# Each step of forward mode compares the sizes of tangents and primals, and makes
# aliases of both. Tracers handle these calls directly: the sizes are in the tracer, and an alias
# at a level is another tracer of the same value.
def _fixed_shape(x: Any) -> Any:
    shape = _shape_of(x)
    return shape if _INT.issuperset(map(type, shape)) else None


def _is_same_size(args: Sequence[Any]) -> Any:
    if not tls.state.plain:
        return NotImplemented
    with DisableTorchFunctionSubclass():
        shape, other = _fixed_shape(args[0]), _fixed_shape(args[1])
    return NotImplemented if shape is None or other is None else shape == other


def _has_same_storage_numel(args: Sequence[Any]) -> Any:
    return True if tls.state.plain else NotImplemented


def _alias(args: Sequence[Any]) -> Any:
    x, state = args[0], tls.state
    if type(x) is not SlottedBatchTracer or not state.plain:
        return NotImplemented
    level = x.dispatch_level
    if not level.alive or level.restores or not state.mask & level.key_bit:
        return NotImplemented
    return x.aliased_here()


for _name, _answer in (
    ("is_same_size", _is_same_size),
    ("_has_same_storage_numel", _has_same_storage_numel),
    ("alias", _alias),
    ("detach", _alias),
):
    operator_of(getattr(torch.ops.aten, _name).default).by_tracers = _answer


class FastBatchTracer(BatchTracer):
    """A batched tensor whose handlers run call plans."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or NO_KWARGS
        try:
            out = call_by_plan(func, types, args, kwargs)
            return function_handler(func, types, args, kwargs) if out is NotImplemented else out
        except EscapedTracerError as error:
            values = unwrap_ended(args, kwargs)
            if values is None:
                fold_traceback(error, str)  # the user called torch, not this package
                raise
            return func(*values[0], **values[1])
        except CALL_ERRORS as error:
            keep_call_of_example(error, func, args, kwargs)
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        op = operator_of(func)
        if op.by_tracers is not None:
            out = op.by_tracers(args)
            if out is not NotImplemented:
                return out
        kwargs = kwargs or NO_KWARGS
        if op.direct_rule is not None:
            out = dispatch_by_plan(op, args, kwargs)
            if out is not NotImplemented:
                return out
        return op.call(args, kwargs, True)


class SlottedBatchTracer(SlottedTracer, FastBatchTracer):
    """The tracer class that :func:`wrap` makes."""

    __slots__ = ()


class PromotedBatchTracer(FastBatchTracer):
    """A user's tensor that became a tracer (``writes``), with the layout of a plain tensor."""

    __slots__ = ()


BatchTracer.layouts = PromotedBatchTracer, SlottedBatchTracer
# Messages show one name for all of these classes.
SlottedBatchTracer.__name__ = PromotedBatchTracer.__name__ = BatchTracer.__name__
TRACERS.update((SlottedBatchTracer, PromotedBatchTracer))


def _use_compiled() -> None:
    """Let the compiled handlers, if they are built, take calls before the Python ones."""
    handlers = compiled.load()
    if handlers is None:
        return
    handlers.setup({
        "tracer": SlottedBatchTracer, "promoted": PromotedBatchTracer, "level": BatchLevel,
        "state": State, "torch_state": TorchState, "operator": TorchOperator,
        "plans": CallPlanTable, "plan": CallPlan, "form": Form, "tls": tls, "size": torch.Size,
        "function_handler": FastBatchTracer.__dict__["__torch_function__"].__func__,
        "overload_type": OpOverload, "operators": operators_by_id,
        "function_plans": FUNCTION_PLANS, "parameter": torch.nn.Parameter,
        "no_tensors": NO_TENSORS, "wrap": wrap_in_python, "alias": _alias,
        "same_size": _is_same_size, "same_numel": _has_same_storage_numel,
        "batch_changed": BatchChanged, "call_errors": (BatchChanged, *CALL_ERRORS),
        "record": record_recipes, "tracer_level": TracerLevel,
        "value": sys.intern("value"), "bdim": sys.intern("bdim"),
        "dispatch_level": sys.intern("dispatch_level"), "lift": sys.intern("lift"),
        "keep_refused_call": keep_call_of_example,
        "torch_function": sys.intern("__torch_function__"),
        "handle_torch_function": handle_with_all_arguments, "loses_arguments": LOSES_ARGUMENTS,
        **{f"step_{step.value}": step for step in PlanStep},
    })  # fmt: skip
    for kind in (SlottedBatchTracer, PromotedBatchTracer):
        handlers.install_function_handler(kind)
    watch_direct_rules(handlers.install)


_use_compiled()
