"""The Trace and Specialize keys: the kernels that record a program.

The Specialize kernel computes the results of an operator on fake values. The Trace kernel runs the
Specialize kernel, and records the call. Both kernels see the operators as the user called them:
autograd is outside of the level, so composite operators stay whole, and a program can be
differentiated, vmapped and traced again.

Private names used here (torch 2.13 and 2.14): ``torch._subclasses.fake_tensor`` has the errors for
data-dependent results; ``DisableTorchFunction`` disables function modes in kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.fx
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from tsfunc import pytrees
from tsfunc.bridge.sizes.fake_results import results_of
from tsfunc.bridge.sizes.symbolic_numbers import (
    call_past_parser,
    shape_node,
)
from tsfunc.bridge.trace.tensor_guards import offset_outside
from tsfunc.bridge.trace.trace_level import (
    SYMBOLIC,
    TraceLevel,
    TraceTracer,
    data_dependent_message,
    map_items,
    record_call,
    tracing_here,
)
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.questions import (
    defer_guards,
    has_symbols,
)
from tsfunc.bridge.tracers.tracer import (
    metadata,
)
from tsfunc.dispatch import (
    DispatchKey,
    Operator,
    current_levels,
    register,
    register_fallback,
    running_level,
)
from tsfunc.errors import DataDependentError, MissingRuleError

T = TypeVar("T")


def traces_dtensors() -> bool:
    """True if the running code is traced for inputs with DTensors among them."""
    return any(isinstance(x, TraceLevel) and x.of_dtensors for x in current_levels())


def _reads_requires_grad(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return whether autograd will record on the tensor when the program runs."""
    own = metadata(func, types, args, kwargs)
    if own or not isinstance(args[0], TraceTracer):
        return own
    return records_outside(args[0])


def records_outside(value: TraceTracer) -> bool:
    """True if autograd will record on a tensor when the program runs; guards compare that."""
    value.dispatch_level.tensor_guards.of_grad = True
    return value.tracks


function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD,
    _reads_requires_grad,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
)


def _new_tensor(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Implement ``x.new_tensor(data)``; torch's own detaches its result in place."""
    if not tracing_here() or not kwargs.keys() <= {"dtype", "device", "requires_grad"}:
        return NotImplemented
    like, data = args
    options = {"dtype": like.dtype, "device": like.device, **kwargs}
    if has_symbols([data], {}):
        return call_past_parser(torch.tensor, (data,), options)
    if not isinstance(data, torch.Tensor):
        return torch.tensor(data, **options)
    requires_grad = options.pop("requires_grad", False)
    made = data.detach().clone().to(**options)
    return made.requires_grad_() if requires_grad else made


function_rules.add(Stage.METHOD, _new_tensor, torch.Tensor.new_tensor)


@register("aten::detach", DispatchKey.Trace)
def _detach(value: TraceTracer) -> TraceTracer:
    """Implement autograd's own detach at this level; the function handler records the user's."""
    return value.aliased_here()


@register("aten::_has_same_storage_numel", DispatchKey.Trace)
def _same_storage(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Accept a tangent in forward mode, which compares the sizes of storages."""
    return True


@register("aten::as_strided", DispatchKey.Trace)
def _as_strided(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Guard the strides and the offset of the value, which the derivative depends on."""
    if isinstance(value, TraceTracer):
        with DisableTorchFunction():
            recorded = value.tracks or value.requires_grad
        if recorded:
            value.dispatch_level.tensor_guards.ask_strides(value.value)
            explicit = (*args[2:], kwargs.get("storage_offset"))[0] is not None
            if explicit and offset_outside(value):
                value.dispatch_level.tensor_guards.refuse(
                    "the derivative of as_strided is needed",
                    "the tensor does not begin where its storage does",
                    "Pass x.clone().",
                )
    return trace_kernel(operator_of(torch.ops.aten.as_strided.default), (value, *args), kwargs)


@register("aten::view_as_real", DispatchKey.Trace)
def _view_as_real(value: TraceTracer) -> Any:
    """Resolve conjugation: the value has the conjugate bit, and its tracer does not."""
    if value.conjugated():
        value = trace_kernel(operator_of(torch.ops.aten.clone.default), (value,), {})
    return trace_kernel(operator_of(torch.ops.aten.view_as_real.default), (value,), {})


@register_fallback(DispatchKey.Specialize)
def specialize_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of the Specialize key: compute results on fake values."""
    level = running_level()
    assert isinstance(level, TraceLevel)

    def fake(arg: Any) -> Any:
        if isinstance(arg, TraceTracer) and arg.dispatch_level is level:
            return arg.value
        return level.lift(arg).value if isinstance(arg, torch.Tensor) else arg

    values = tuple([map_items(fake, arg) for arg in args])
    named = {name: map_items(fake, arg) for name, arg in kwargs.items()}
    try:
        if isinstance(op, TorchOperator):
            return level.results.of(op, values, named)
        return results_of(level.fake, op.name, op.outward, False, values, named)
    except (DataDependentOutputException, DynamicOutputShapeException):
        if not level.symbols.allow_data():
            raise DataDependentError(data_dependent_message(op.name, level)) from None
    return specialize_kernel(op, args, kwargs)


@register_fallback(DispatchKey.Trace)
def trace_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of the Trace key: compute the results, and record the call."""
    level = running_level()
    assert isinstance(level, TraceLevel)
    if not isinstance(op, TorchOperator):
        raise MissingRuleError(
            f"{level.name}: {op.name} is not a torch operator, so a program can't name it. "
            f"Register a Trace kernel for it (tsfunc.dispatch.register(op, DispatchKey.Trace))."
        )
    if op.reshapes and isinstance(args[0], TraceTracer):
        with DisableTorchFunction(), level.fake:  # keep the value that the graph's node has
            args[0].value = torch.ops.aten.alias.default(args[0].value)
    if level.bodies and not any(isinstance(x, torch.Tensor) for x in pytrees.leaves_of(args)):
        level = level.bodies[-1]  # the body's code is running, and calls a factory
    results = op.run_key(DispatchKey.Specialize, level, args, kwargs)
    return record_call(op, args, kwargs, results, level)


@register("aten::lift_fresh", DispatchKey.Trace)
def _lift_fresh(value: torch.Tensor) -> Any:
    """Return a copy of the tensor that ``torch.tensor(data)`` has just made.

    At every run of a program the function makes a new tensor, which it may write into or return.
    """
    return trace_kernel(operator_of(torch.ops.aten.lift_fresh_copy.default), (value,), {})


def surely(guard: Callable[..., T | None], *args: Any) -> T | None:
    """Return the result of a guard; None if it holds only for some sizes of a running trace.

    A program that serves some sizes only would restrict the trace to them.
    """
    levels = current_levels()
    environments = [level.symbols.environment for level in levels if isinstance(level, TraceLevel)]
    with contextlib.ExitStack() as stack:
        open_facts = [
            stack.enter_context(defer_guards(env)) for env in environments if env is not None
        ]
        found = guard(*args)
    return None if any(open_facts) else found


def node_of_output(value: Any, level: TraceLevel) -> Any:
    """Return the node, or the constant, for a result of the traced function."""
    if isinstance(value, TraceTracer) and value.dispatch_level is level:
        return value.node
    if isinstance(value, torch.Tensor):
        return level.lift(value).node
    if isinstance(value, torch.Size):
        return shape_node(level.graph, [node_of_output(size, level) for size in value])
    return level.sizes(value) if isinstance(value, SYMBOLIC) else value
