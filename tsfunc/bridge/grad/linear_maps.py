"""Linear maps of a level's tensors that are not operators: subsets, collectives, layouts.

NOTE [linear maps]
Each map here is linear in its operands, and its transpose is a linear map too. ``run`` gets
operands of one level. ``run`` calls itself on the values inside until it reaches the subset's
level, where it works on physical values. If autograd records at a level on the way, or the level's
tracers carry tangents, the map is one node of that level's graph.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._C import DisableTorchFunction
from torch.autograd import Function

from tsfunc.bridge.grad.autograd import outside_graph
from tsfunc.bridge.grad.custom_function import torch_apply
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, sync
from tsfunc.ops.dims import without_overlaps


class LinearMap:
    """A linear map of tensors at a subset's level or inside of it."""

    def run(self, values: Sequence[Any]) -> Any:
        raise NotImplementedError

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        raise NotImplementedError


def linear(f: LinearMap, values: Sequence[Tracer]) -> Any:
    """Apply a map, as a node of the graph if the level of its operands records one."""
    if any(is_recorded(v) for v in values):
        return torch_apply(_Node, f, torch.is_grad_enabled(), *values)
    return f.run(values)


class _Node(Function):
    """A linear map in a graph: its backward is the transpose, and its jvp is the map itself."""

    lays_out_results = True  # the batch dims of a result are where the map has put them

    @staticmethod
    def forward(ctx: Any, f: LinearMap, grad_mode: bool, *values: Any) -> Any:
        ctx.f = f
        ctx.count = len(values)
        ctx.levels = [v.dispatch_level for v in values]
        ctx.zeros = (
            [functools.partial(torch.zeros_like, v) for v in values] if len(values) > 1 else None
        )
        # The values inside belong to other levels, whose graphs continue.
        with outside_graph(grad_mode):
            return f.run(values)

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, cotangent: Any) -> Any:
        return (None, None, *ctx.f.transpose(cotangent))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        directions = tangents[2:]
        if ctx.zeros is not None:
            directions = tuple(
                zero() if t is None else t for t, zero in zip(directions, ctx.zeros, strict=True)
            )
        # A tangent that is the same for all examples may come without the levels of its value. The
        # tangents have a map of their own, which keeps what its transpose needs to know of them.
        return linear(
            copy.copy(ctx.f),
            [at_level(t, level) for t, level in zip(directions, ctx.levels, strict=True)],
        )


_SAME: Final = object()


def rebuilt(tracer: Any, value: torch.Tensor, bdim: Any = _SAME) -> Any:
    """Return a tracer of the same level and kind for another value."""
    if isinstance(tracer, BatchTracer):
        dim = tracer.bdim if bdim is _SAME else bdim
        return wrap(value, dim, tracer.dispatch_level)
    assert isinstance(tracer, GradTracer)
    return tracer.dispatch_level.lift(value)


def is_recorded(value: Tracer) -> bool:
    """True if the tracer's own level differentiates by it."""
    level = value.dispatch_level
    if level.forward:
        return True
    with DisableTorchFunction():  # a function mode would handle the access
        return bool(level.autograd) and value.requires_grad


def batched_value(value: BatchTracer, level: BatchLevel) -> tuple[torch.Tensor, int]:
    """Return the physical value with a batch dim, and the position of that dim."""
    if value.bdim is not None:
        return value.value, value.bdim
    inner = value.value
    return inner.unsqueeze(0).expand(level.batch_size, *inner.shape), 0


def value_batch_first(value: BatchTracer, level: BatchLevel) -> torch.Tensor:
    """Return the physical value of a tracer of the level, with a batch dim in front."""
    inner, dim = batched_value(value, level)
    return inner.movedim(dim, 0)


def at_level(value: torch.Tensor, level: TracerLevel) -> Any:
    """Return a tensor as a tracer of the level; a tracer of an inner level is unchanged."""
    sync(value)
    if isinstance(value, Tracer) and value.dispatch_level.depth >= level.depth:
        return value
    return level.lift(value)


# NOTE [layouts]
# A tracer's physical value may have its batch dims at any position, or none. A function of physical
# values (a body of control flow) expects them at fixed positions. Moving them there changes nothing
# at the tracer's own level: the move is a linear map, and the identity.
class Layout(LinearMap):
    """A map that moves the batch dims of a tensor's physical values to given positions.

    Args:
        layers: the levels, the innermost first, each with its batch dim or None.
    """

    def __init__(self, layers: Sequence[tuple[TracerLevel, int | None]]) -> None:
        self.layers = layers

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level, target_dim = self.layers[0]
        with level.restored():
            inner, dim = value.value, getattr(value, "bdim", None)
            # Move this level's dim first: moving it may move the dims of the outer levels.
            rest = Layout(self.layers[1:])
            if not isinstance(level, BatchLevel):
                return level.lift(rest.of(inner))
            if dim is None and target_dim is not None:
                inner = inner.unsqueeze(target_dim).expand(
                    *inner.shape[:target_dim], level.batch_size, *inner.shape[target_dim:]
                )
                if level.forward:
                    inner = without_overlaps(inner)  # as ``make_dual`` does: results may be views
            elif dim != target_dim:
                inner = inner.movedim(dim, target_dim)
            return wrap(rest.of(inner), target_dim, level)

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the batch dims at these positions."""
        if not self.layers:
            return value
        level = self.layers[0][0]
        is_of_level = isinstance(value, Tracer) and value.dispatch_level is level
        tracer: Any = value if is_of_level else level.lift(value)
        return linear(self, (tracer,))

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (cotangent,)
