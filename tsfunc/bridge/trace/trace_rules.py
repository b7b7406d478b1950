"""Rules of single operators and methods in a trace, and predicates on running traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
import torch.fx
from torch._C import DisableTorchFunction
from torch._ops import OpOverload

from tsfunc.bridge.sizes.symbolic_numbers import call_past_parser
from tsfunc.bridge.trace.tensor_guards import offset_outside
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer, current_trace, trace_kernel
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.torch_state import in_backward_formula
from tsfunc.bridge.tracers.tracer import metadata
from tsfunc.bridge.tracers.user_queries import defer_guards, has_symbols
from tsfunc.dispatch import DispatchKey, current_levels, register
from tsfunc.ops.registry import Args, Kwargs

T = TypeVar("T")


def traces_dtensors() -> bool:
    """True if the running code is traced for inputs with DTensors among them."""
    return any(isinstance(x, TraceLevel) and x.of_dtensors for x in current_levels())


def _reads_requires_grad(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """True if autograd will record on the tensor when the program runs."""
    answer = metadata(func, types, args, kwargs)
    if answer or not isinstance(args[0], TraceTracer):
        return answer
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


def _new_tensor(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Implement ``x.new_tensor(data)``; torch's own detaches its result in place."""
    if current_trace() is None or not kwargs.keys() <= {"dtype", "device", "requires_grad"}:
        return NotImplemented
    like, data = args
    options = {"dtype": like.dtype, "device": like.device, **kwargs}
    if has_symbols([data]):
        return call_past_parser(torch.tensor, (data,), options)
    if not isinstance(data, torch.Tensor):
        return torch.tensor(data, **options)
    requires_grad = options.pop("requires_grad", False)
    tensor = data.detach().clone().to(**options)
    return tensor.requires_grad_() if requires_grad else tensor


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
            value.dispatch_level.tensor_guards.guard_strides(value.value)
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
    if value.is_lazily_conjugated():
        value = trace_kernel(operator_of(torch.ops.aten.clone.default), (value,), {})
    return trace_kernel(operator_of(torch.ops.aten.view_as_real.default), (value,), {})


@register("aten::lift_fresh", DispatchKey.Trace)
def _lift_fresh(value: torch.Tensor) -> Any:
    """Return a copy of the tensor that ``torch.tensor(data)`` has just made.

    At every run of a program the function makes a new tensor, which it may write into or return.
    """
    return trace_kernel(operator_of(torch.ops.aten.lift_fresh_copy.default), (value,), {})


@register("aten::allclose", DispatchKey.Trace)
def _allclose(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compare tensors; in a backward formula, check when the program runs that they are close.

    The formula of a complex ``svd`` needs the answer in C++, and refuses cotangents if it is False.
    """
    overload = torch.ops.aten.allclose.default
    answer = trace_kernel(operator_of(overload), (value, *args), kwargs)
    if not in_backward_formula() or isinstance(answer, bool):
        return answer
    torch._check(answer, lambda: f"A backward formula refuses the values that {overload} compares.")
    return True


@register("aten::item", DispatchKey.Trace)
def _item(value: TraceTracer) -> Any:
    return read_number(torch.ops.aten.item.default, value)


def read_number(read: OpOverload, value: TraceTracer) -> Any:
    """Return an element as a number: a known number, or one that depends on data.

    Args:
        read: the operator that reads it.
    """
    number = value.known_number()
    return trace_kernel(operator_of(read), (value,), {}) if number is None else number


def guard_or_none(guard: Callable[..., T | None], *args: Any) -> T | None:
    """Return the result of a guard; None if it holds only for some sizes of a running trace.

    A program that serves some sizes only would restrict the trace to them.
    """
    levels = current_levels()
    environments = [level.symbols.environment for level in levels if isinstance(level, TraceLevel)]
    with contextlib.ExitStack() as stack:
        open_facts = [
            stack.enter_context(defer_guards(env)) for env in environments if env is not None
        ]
        value = guard(*args)
    return None if any(open_facts) else value
