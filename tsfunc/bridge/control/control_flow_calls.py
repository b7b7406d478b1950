"""A call of control flow in a trace, at each level that its tensors are of.

See NOTE [control flow in programs] in ``control_flow``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch.autograd import Function

from tsfunc.bridge.control.bodies import needed_frames, rewrap_as
from tsfunc.bridge.control.control_flow import ControlFlow, RandomStates, random_state
from tsfunc.bridge.control.linear_calls import refuse_tangents_in_subsets, saved_as_seen
from tsfunc.bridge.control.traced_bodies import TracedResult
from tsfunc.bridge.grad.autograd import is_differentiable, outside_graph
from tsfunc.bridge.grad.custom_function import torch_apply
from tsfunc.bridge.grad.linear_maps import is_recorded
from tsfunc.bridge.sizes.strides import derivative_strides
from tsfunc.bridge.trace.trace_level import TraceLevel, traced_as
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.level_proxies import all_as_seen_by_current_level
from tsfunc.bridge.tracers.replay import keeps_draws, replay_object
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.bridge.tracers.tracer_stack import Frame, TracerStack, unwrap_all
from tsfunc.dispatch.state import tls
from tsfunc.ops.dims import dense_strides


def call_control_flow(
    op: ControlFlow, trace: TraceLevel, inputs: Sequence[Any], numbers: Sequence[Any],
    results: Sequence[TracedResult],
) -> tuple[Any, ...]:  # fmt: skip
    """Call an operator at the trace, and at each inner level that its inputs belong to.

    A call that a checkpoint runs again draws the random numbers of its first run.
    """
    call = _Call(op, trace, tuple(numbers))
    if op.random and keeps_draws(trace):
        first: list[Any] = []

        def states() -> Any:
            first.append(call.states(results))
            return first[0]

        devices, drawn = replay_object(states, lambda states: True, trace)
        if not first:
            replays = op.replayed(len(inputs), devices)
            call = _Call(replays, trace, tuple(numbers), saved=len(inputs))
            inputs = [*inputs, *drawn]
    return call.at(inputs, results)


@dataclass(frozen=True)
class _Call:
    """A call of an operator at a trace.

    Attributes:
        saved: the number of inputs that autograd saves as tensors, None for all: a checkpoint
            expects that a rerun saves the tensors of the first run.
        quiet: True if the function has turned grad mode off around a level of the inputs.
    """

    op: ControlFlow
    trace: TraceLevel
    numbers: tuple[Any, ...]
    saved: int | None = None
    quiet: bool = False

    def states(
        self, results: Sequence[TracedResult]
    ) -> tuple[tuple[torch.device, ...], Sequence[Any]]:
        """Return the generators that the operator may use, and their states before the call."""
        if not self.op.random and not self.op.opaque:
            return (), ()
        cpu = torch.device("cpu")
        devices = tuple(dict.fromkeys([cpu, *(result.value.device for result in results)]))
        with self.trace.fake:
            like = [torch.empty(random_state(d).shape, dtype=torch.uint8) for d in devices]
            like.append(torch.empty(0, dtype=torch.int64))
        call = _Call(RandomStates(devices), self.trace, ())
        return devices, call.record((), [TracedResult(x, TracerStack()) for x in like])

    def at(self, inputs: Sequence[Any], results: Sequence[TracedResult]) -> tuple[Any, ...]:
        """Call at the innermost level of the inputs: as a node of its graph, if it records one."""
        depth = max((x.dispatch_level.depth for x in inputs), default=self.trace.depth)
        tracers = [x for x in inputs if x.dispatch_level.depth == depth]
        if any(is_recorded(x) for x in tracers):
            # Others are lifted: their own graphs go on inside (NOTE [operands of outer levels]).
            lift = tracers[0].dispatch_level.lift
            lifted = [x if x.dispatch_level.depth == depth else lift(x) for x in inputs]
            return torch_apply(_Recorded, self, results, torch.is_grad_enabled(), *lifted)
        return self.inward(inputs, results)

    def inward(self, inputs: Sequence[Any], results: Sequence[TracedResult]) -> tuple[Any, ...]:
        """Call on the values that the innermost level's tracers wrap."""
        depth = max((x.dispatch_level.depth for x in inputs), default=self.trace.depth)
        depth = max([depth, *(r.stack.frames[0].level.depth for r in results
                              if r.stack.frames)])  # fmt: skip
        if depth <= self.trace.depth:
            return self.record(inputs, results)
        inner = [x.value if x.dispatch_level.depth == depth else x for x in inputs]
        levels = [x.dispatch_level for x in inputs if x.dispatch_level.depth == depth]
        stripped, frames = [], []
        for result in results:
            wrapped = result.stack.frames
            is_at_depth = bool(wrapped) and wrapped[0].level.depth == depth
            frames.append(wrapped[0] if is_at_depth else None)
            rest = TracerStack(wrapped[1:]) if is_at_depth else result.stack
            stripped.append(TracedResult(result.value, rest))
        # The function may have turned grad mode off at a level that the trace does not know of.
        recorded = all(level.torch_state.grad_mode for level in levels[:1])
        call = self if recorded else replace(self, quiet=True)
        outputs = call.at(inner, stripped)
        return tuple(
            value if frame is None else TracerStack((frame,)).wrap(value)
            for value, frame in zip(outputs, frames, strict=True)
        )

    def record(self, inputs: Sequence[Any], results: Sequence[TracedResult]) -> tuple[Any, ...]:
        """Record the call as a node of the trace."""
        trace = self.trace
        nodes = [x.node for x in inputs]
        node = trace.record(self.op, (*nodes, *self.numbers))
        with trace.restored():  # the grad mode of a backward pass is not that of the program
            recorded = torch.is_grad_enabled() and not self.quiet
        tracks = recorded and any(x.tracks for x in inputs)
        if not recorded and (trace.torch_state.grad_mode or trace.torch_state.paused):
            node.meta["no_grad"] = True
        outs = []
        for i, result in enumerate(results):
            item = trace.graph.call_function(operator.getitem, (node, i))
            like = result.value
            fake = trace.fake_like(like, like.shape, like.stride())
            outs.append(traced_as(fake, item, trace, tracks))
        return tuple(outs)


def _depends_on(result: TracedResult, level: TracerLevel, trace: TraceLevel) -> bool:
    """True if a result can depend on the variables of a level: it is one of the level's tracers."""
    is_batched_there = any(frame.level.depth == level.depth for frame in result.stack.frames)
    return is_differentiable(result.value) and (is_batched_there or level.depth <= trace.depth)


class _Recorded(Function):
    """A call as one node of the graph of a level that differentiates by some of its inputs."""

    # The trace knows the batch dims and the strides of the results: NOTE [layouts of results] in
    # ``traced_bodies``.
    lays_out_results = True

    @staticmethod
    def forward(
        ctx: Any, call: _Call, results: Sequence[TracedResult], grad_mode: bool, *inputs: Any
    ) -> Any:
        ctx.call, ctx.results = call, results
        ctx.save_for_backward(*inputs[: call.saved])
        ctx.save_for_forward(*inputs[: call.saved])
        ctx.kept = () if call.saved is None else inputs[call.saved :]
        ctx.set_materialize_grads(False)
        # The values inside belong to other levels, whose graphs continue.
        with outside_graph(grad_mode):
            ctx.devices, ctx.states = call.states(results)
            outs = call.inward(inputs, results)
        level = inputs[0].dispatch_level
        # Results are tracers of the node's level: torch hangs its graph and tangents on them.
        outs = tuple(x if x.dispatch_level.depth >= level.depth else level.lift(x) for x in outs)
        ctx.differentiable = [_depends_on(result, level, call.trace) for result in results]
        ctx.mark_non_differentiable(
            *[
                x
                for x, differentiable in zip(outs, ctx.differentiable, strict=True)
                if not differentiable
            ]
        )
        return outs

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call, inputs, states = _as_seen_here(ctx)
        results = ctx.results
        wrt = [
            i for i, x in enumerate(inputs) if ctx.needs_input_grad[3 + i] and is_differentiable(x)
        ]
        level = inputs[0].dispatch_level
        of = [j for j, ct in enumerate(cotangents) if ct is not None and ctx.differentiable[j]]
        cts_in: list[Any] = [None] * len(inputs)
        if wrt and of:
            # Cotangents may be batched by vmaps inside of the level.
            inside = _frames_inside([cotangents[j] for j in of], level)
            wrapped = [
                rewrap_as(cotangents[j], _batched_layout(results[j].stack, inside)) for j in of
            ]
            op = _replay_draws(ctx, call.op.pullback(len(inputs), wrt, of), len(inputs) + len(of))
            for _ in inside:
                batched = [False] * len(inputs) + [True] * len(of) + [False] * len(ctx.states)
                op = op.mapped(batched)
            samples = [_without_gaps(_result_like(inputs[i]), call.trace) for i in wrt]
            wanted = [_mapped_result(one, inside, call.trace) for one in samples]
            operands = [*inputs, *wrapped, *states]
            gradients = call_control_flow(op, call.trace, operands, call.numbers, wanted)
            for i, value in zip(wrt, gradients, strict=True):
                cts_in[i] = value
        return (None, None, None, *cts_in)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        call, inputs, states = _as_seen_here(ctx)
        wrt = [i for i, t in enumerate(tangents[3:]) if t is not None]
        # A zero tangent can be a tensor of torch's own: NOTE [the factory keys] in ``torch_state``.
        directions = {i: call.trace.lifted_here(tangents[3 + i]) for i in wrt}
        wrapped = [rewrap_as(t, unwrap_all(inputs[i])[1]) for i, t in directions.items()]
        op = _replay_draws(ctx, call.op.pushforward(len(inputs), wrt), len(inputs) + len(wrt))
        operands = [*inputs, *wrapped, *states]
        dense = [_without_gaps(result, call.trace) for result in ctx.results]
        tangents_out = call_control_flow(op, call.trace, operands, call.numbers, dense)
        return tuple(
            t if differentiable else None
            for t, differentiable in zip(tangents_out, ctx.differentiable, strict=True)
        )


def _as_seen_here(ctx: Any) -> tuple[_Call, list[Any], list[Any]]:
    """Return the call of a node, its inputs and random states, as the running code sees them.

    A body of control flow may pull back through a call of the code around it.
    """
    call = ctx.call
    here = [x for x in tls.state.levels if isinstance(x, TraceLevel) and x.within(call.trace)]
    if here:
        call = replace(call, trace=here[-1])
    saved = [*ctx.saved_tensors, *ctx.kept]  # a checkpoint lets a node read them once
    refuse_tangents_in_subsets(call.trace.root, saved)
    inputs = [_seen_as_lifted(value) for value in saved]
    return call, inputs, all_as_seen_by_current_level([*ctx.states])


def _seen_as_lifted(value: Any) -> Any:
    """Return a saved tensor as the running code sees it, in the layout that the node has saved.

    A tensor that the node has lifted to its level is not batched there, so the level does not
    differentiate by it.
    """
    if not (isinstance(value, BatchTracer) and value.bdim is None):
        return saved_as_seen(value)
    depth = value.dispatch_level.depth
    (level,) = [x for x in tls.state.levels if x.depth == depth] or [value.dispatch_level]
    while isinstance(value, BatchTracer) and value.bdim is None:
        value = value.value
    seen = saved_as_seen(value)
    return level.lift(seen) if isinstance(level, TracerLevel) else seen


def _replay_draws(ctx: Any, op: ControlFlow, count: int) -> ControlFlow:
    """Return a derivative of a call that draws the same random numbers as the call."""
    return op.replayed(count, ctx.devices) if ctx.states else op


def _frames_inside(values: Sequence[Any], level: TracerLevel) -> list[Frame]:
    """Return the vmaps inside of a level that batch some values, the innermost first."""
    frames: dict[int, Frame] = {}
    for value in values:
        for depth, frame in needed_frames(value).items():
            if depth > level.depth and frame.bdim is not None:
                frames[depth] = frame
    return [frame for _, frame in sorted(frames.items(), reverse=True)]


def _batched_layout(stack: TracerStack, inside: Sequence[Frame]) -> TracerStack:
    """Return a layout with the batch dims of inner vmaps before all others."""
    return TracerStack((*inside, *stack.shifted_by(len(inside)).frames))


def _mapped_result(
    result: TracedResult, inside: Sequence[Frame], trace: TraceLevel
) -> TracedResult:
    """Return the type of a result of a batch of calls."""
    if not inside:
        return result
    value = result.value
    for frame in inside:
        assert isinstance(frame.level, BatchLevel)
        shape = (frame.level.batch_size, *value.shape)
        value = trace.fake_like(value, shape, dense_strides(shape))
    return TracedResult(value, _batched_layout(result.stack, inside))


def _result_like(value: Any) -> TracedResult:
    inner, stack = unwrap_all(value)
    return TracedResult(inner.value, stack)


def _without_gaps(result: TracedResult, trace: TraceLevel) -> TracedResult:
    """Return the type of a derivative: NOTE [layouts of derivatives] in ``strides``."""
    value = result.value
    strides = derivative_strides(value)
    if strides is None or strides == [*value.stride()]:
        return result
    return TracedResult(trace.fake_like(value, value.shape, strides), result.stack)
