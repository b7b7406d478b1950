"""Reading of predicates and branch indices: one choice for all examples, or one for each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.grad.linear_maps import value_batch_first
from tsfunc.bridge.trace.trace_level import TraceTracer, current_trace
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.functorch import is_batched_in_functorch
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import innermost_value, nested_tracers
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.bridge.tracers.user_queries import SYMBOLIC
from tsfunc.errors import DataDependentError
from tsfunc.user_code import AbandonedRun


@dataclass(frozen=True)
class BatchedChoice:
    """A choice that differs from example to example of a vmap.

    Attributes:
        level: the level of the vmap.
        values: the choice of each example, a tensor of one dim that is outside of the level.
        known: True if the values can be read: they are not traced or batched.
    """

    level: BatchLevel
    values: torch.Tensor
    known: bool

    @property
    def is_empty(self) -> bool:
        """True if there are no examples."""
        size: Any = self.values.shape[0]
        return type(size) is int and size == 0


@dataclass(frozen=True)
class TracedChoice:
    """A choice that is made when the program runs."""

    value: TraceTracer


Choice = bool | int | BatchedChoice | TracedChoice


def predicate_of(value: Any, label: str) -> bool | BatchedChoice | TracedChoice:
    """Read a predicate: True if the value is not zero.

    Raises:
        TypeError: the value is not a number or a tensor of one element.
    """
    value = _without_numpy(value)
    if isinstance(value, float):
        return value != 0
    inexact = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    choice = choice_of(value != 0 if inexact else value, label)
    if isinstance(choice, BatchedChoice):
        return BatchedChoice(choice.level, choice.values != 0, choice.known)
    return bool(choice) if isinstance(choice, int) else choice


def _without_numpy(value: Any) -> Any:
    """Return the Python number of a NumPy scalar, and anything else unchanged.

    NumPy is not a requirement. Its scalars occur only where a user has imported it.
    """
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def choice_of(value: Any, label: str) -> Choice:
    """Read a predicate or an index.

    Raises:
        TypeError: the value is not a number or a tensor of one element.
        DataDependentError: the value differs among the examples of a vmap of torch.func.
    """
    value = _without_numpy(value)
    if isinstance(value, bool | int):
        return value
    if isinstance(value, SYMBOLIC):
        number: Any = value
        value = torch.full((), number)  # a symbolic size, known when the program runs
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{label}: expected a bool, an int or a tensor of one element to choose by, got "
            f"{'None' if value is None else type(value).__name__}."
        )
    if value.numel() != 1:
        raise TypeError(
            f"{label}: expected a choice by a tensor of one element, got one of shape "
            f"{tuple(value.shape)}. For a choice for each element use torch.where, or vmap."
        )
    if value.is_floating_point() or value.is_complex():
        raise TypeError(
            f"{label}: expected a choice by a bool or an integer, got a tensor of {value.dtype}. "
            f"Compare the tensor with a number, as in x > 0."
        )
    inner: Any = as_seen_by_current_level(value)
    trace = current_trace()
    if trace is not None and not isinstance(inner, Tracer):
        inner = trace.lift(inner)  # an outside tensor, which the program reads anew
    while isinstance(inner, BatchTracer | GradTracer):
        if isinstance(inner, BatchTracer) and inner.bdim is not None:
            level = inner.dispatch_level
            with level.restored():
                values = value_batch_first(inner, level).reshape(level.batch_size)
            return BatchedChoice(level, values, _is_readable(values))
        inner = inner.value
    if isinstance(inner, TraceTracer):
        return TracedChoice(inner)
    if is_batched_in_functorch(inner):
        raise DataDependentError(
            f"{label}: the choice differs from example to example of torch.func.vmap, which runs "
            f"the same operators for all of them. Use tsfunc.vmap (and tsfunc's transforms around "
            f"it), which runs each branch for its own examples; or compute both and choose by "
            f"torch.where."
        )
    return bool(inner) if inner.dtype is torch.bool else int(inner)


def truth_of(value: Any, subset: BatchLevel | None = None) -> bool | None:
    """Return a condition that is the same for all examples and quick to read; else None.

    Args:
        value: the condition, of code that is not traced.
        subset: a level that the code runs at.
    """
    kind = type(value)
    if kind is bool:
        return value
    if kind is SlottedBatchTracer and value.dispatch_level is subset and value.bdim == 0:
        inner = value.value
        if type(inner) is torch.Tensor and inner.dtype is torch.bool and inner.dim() == 1:
            return True if bool(inner.all()) else None
    elif kind is torch.Tensor and value.dtype is torch.bool and value.dim() == 0:
        return None if is_batched_in_functorch(value) else bool(value)
    return None


def _is_readable(value: Any) -> bool:
    """True if the data of a tensor can be read directly."""
    kinds = BatchTracer | GradTracer
    batched = (getattr(x, "bdim", None) is not None for x in nested_tracers(value, kinds))
    return not any(batched) and not isinstance(innermost_value(value, kinds), Tracer)


class DiffersAtInnerLevel(AbandonedRun):
    """Internal: a predicate with a value for each example of a level differs at an inner level.

    ``caller`` is the caller that needs the predicate; it handles the choice at the inner level.
    """

    def __init__(self, caller: object, level: BatchLevel) -> None:
        super().__init__(f"differs at {level.name} (internal to tsfunc; it should be caught)")
        self.caller, self.level = caller, level


def values_at(value: Any, level: BatchLevel, caller: object = None) -> torch.Tensor:
    """Return a predicate for each example of a level, as a tensor that is outside of the level.

    Raises:
        DiffersAtInnerLevel: the predicate differs among the examples of an inner level.
    """
    inner: Any = as_seen_by_current_level(value)
    while isinstance(inner, Tracer) and inner.dispatch_level.depth > level.depth:
        if isinstance(inner, BatchTracer) and inner.bdim is not None:
            raise DiffersAtInnerLevel(caller, inner.dispatch_level)
        inner = inner.value  # type: ignore[attr-defined]
    with level.restored():
        if isinstance(inner, BatchTracer) and inner.dispatch_level.depth == level.depth:
            if inner.bdim is not None:
                return value_batch_first(inner, level).reshape(level.batch_size) != 0
            inner = inner.value
        if not isinstance(inner, torch.Tensor):
            return torch.full((level.batch_size,), bool(inner))
        return (inner.reshape(()) != 0).expand(level.batch_size)
