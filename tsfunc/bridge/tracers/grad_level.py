"""The Grad key: tracers that only wrap a value, so that autograd can record on them separately.

A jvp inside a jvp needs separate tensors to attach tangents to (NOTE [one dual level] in
``dual_level``). If the tensors of the enclosing level already have tangents, the inputs become
tracers of a level with this key, whose only kernel runs every operator on the values inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import optree
import torch

from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.tracer import SlottedTracer, Tracer, TracerLevel
from tsfunc.bridge.tracers.user_queries import forwards_call
from tsfunc.dispatch import DispatchKey, Operator, register, register_fallback, running_level


class GradLevel(TracerLevel):
    """A level whose tracers have an autograd graph of their own."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__(DispatchKey.Grad, name)

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        return _wrap(self.lift_for_outer_traces(value), self)


class GradTracer(Tracer):
    """A tensor that wraps one value."""

    __slots__ = ()

    value: torch.Tensor

    def aliased_here(self) -> GradTracer:
        return _wrap(self.value, self.dispatch_level)  # type: ignore[arg-type]

    def detached_here(self) -> GradTracer:
        return _wrap(self.value.detach(), self.dispatch_level)  # type: ignore[arg-type]

    @forwards_call
    def read(self, name: str) -> Any:
        return getattr(self.value, name)()

    def describe(self) -> str:
        from tsfunc.bridge.tracers.texts import text_of, value_text

        value = value_text(self.value)
        return f"GradTracer({text_of(self)} of {self.dispatch_level.name}: {value})"


class SlottedGradTracer(SlottedTracer, GradTracer):
    """The class of a slotted tracer that became a GradTracer (``promotion``)."""

    __slots__ = ()


GradTracer.layouts = GradTracer, SlottedGradTracer


def _wrap(value: torch.Tensor, level: GradLevel) -> GradTracer:
    tracer: GradTracer = GradTracer.make(value, level)
    tracer.value = value
    return tracer


def unwrap_at_level(value: torch.Tensor, level: TracerLevel) -> torch.Tensor:
    """Return the value inside a tracer of the level; other tensors are returned unchanged."""
    if isinstance(value, GradTracer) and value.dispatch_level is level:
        return value.value
    return value


@register("aten::detach", DispatchKey.Grad)
def _detach(value: GradTracer) -> GradTracer:
    """Implement autograd's own detach at this level, which keeps the graphs outside."""
    return value.aliased_here()


@register("aten::view_as_real", DispatchKey.Grad)
def _view_as_real(value: GradTracer) -> GradTracer:
    """Resolve conjugation: a tangent inside can have a conjugate bit that the tracer lacks."""
    return _wrap(torch.view_as_real(value.value.resolve_conj()), value.dispatch_level)  # type: ignore[arg-type]


_LEAVES: Final = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a pytree with each leaf replaced; most arguments are leaves."""
    if isinstance(value, torch.Tensor) or type(value) in _LEAVES:
        return function(value)
    return optree.tree_map(function, value, none_is_leaf=True)


@register_fallback(DispatchKey.Grad)
def grad_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of the Grad key: run the operator on the values inside."""
    level = running_level()
    assert isinstance(level, GradLevel)

    def inner(value: Any) -> Any:
        return unwrap_at_level(value, level) if isinstance(value, torch.Tensor) else value

    def outer(value: Any) -> Any:
        return _wrap(value, level) if isinstance(value, torch.Tensor) else value

    values = [_map_leaves(inner, arg) for arg in args]
    out = op.outward(*values, **{name: _map_leaves(inner, arg) for name, arg in kwargs.items()})
    if isinstance(op, TorchOperator) and op.inplace:
        return op.written_argument(args, kwargs)
    return _map_leaves(outer, out)
