"""Control flow in a trace where each example of a vmap makes its own choice.

The bodies are traced for one example, and the call is a batch of calls, each body of which runs on
an active subset when the program runs: NOTE [hidden vmaps] in ``bridge/control/bodies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsfunc.bridge.control.attempts import CannotUnbatch
from tsfunc.bridge.control.bodies import HiddenVmaps, needed_frames
from tsfunc.bridge.control.control_flow_calls import call_control_flow
from tsfunc.bridge.control.node_writes import written_inputs
from tsfunc.bridge.control.subset_arguments import refused_write
from tsfunc.bridge.control.subsets import SubsetLevel
from tsfunc.bridge.control.traced_bodies import TracedResult
from tsfunc.bridge.trace.trace_level import TraceLevel, current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.tracer_stack import unwrap_all
from tsfunc.ops.dims import dense_strides
from tsfunc.program.passes.effects import is_random
from tsfunc.transforms.control.derived_operators import ControlFlowOperator, MappedOperator


def vmaps_of(value: Any) -> list[BatchLevel]:
    """Return the vmaps that batch a choice.

    Raises:
        CannotUnbatch: one of them replaces another level, or splits its batch, or the trace makes
            one choice for all examples.
    """
    trace = current_trace()
    masks = trace is not None and trace.for_torch
    levels = []
    for frame in needed_frames(value).values():
        level = frame.level
        if frame.bdim is None or not isinstance(level, BatchLevel):
            continue
        if (
            masks
            or isinstance(level, SubsetLevel)
            or level.original is not level
            or level.splitter is not None
        ):
            raise CannotUnbatch(level.original.root)
        levels.append(level)
    return levels


def call_for_examples(
    op: ControlFlowOperator,
    hidden: HiddenVmaps,
    trace: TraceLevel,
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    results: Sequence[TracedResult],
) -> tuple[Any, ...]:
    """Call an operator for each example of the vmaps that its bodies do not see.

    Args:
        tensors: the operands, laid out by ``hidden``.
        numbers: the symbolic numbers that follow the tensors.

    Raises:
        CannotUnbatch: a body draws random numbers, or writes into a tensor from outside of it,
            which is for the examples that run the body.
        RuntimeError: a body writes into a tensor of the function that all examples share.
    """
    if not hidden.levels:
        return call_control_flow(op, trace, tensors, numbers, results)
    columns = list(zip(*(hidden.batched_flags(unwrap_all(x)[1]) for x in tensors), strict=True))
    level = next(iter(hidden.levels.values()))
    batched = {i for flags in columns for i, flag in enumerate(flags) if flag}
    written = {i for body in op.bodies for i in written_inputs(body)}
    for i in sorted(written):
        if i not in batched and not tensors[i].is_from_outside():
            shape = tuple(tensors[i].shape)
            raise RuntimeError(refused_write(op.name, shape, level, "all examples share"))
    if any(i in batched for i in written):
        raise CannotUnbatch(level.original.root)
    if any(is_random(node) for body in op.bodies for node in body.graph.nodes):
        raise CannotUnbatch(level.original.root)
    mapped = op
    for flags in reversed(columns):  # the innermost vmap first
        mapped = MappedOperator(mapped, flags)
    sizes = [hidden.levels[depth].batch_size for depth in sorted(hidden.levels)]
    return call_control_flow(
        mapped, trace, tensors, numbers, [_of_all(r, sizes, hidden, trace) for r in results]
    )


def _of_all(
    one: TracedResult, sizes: Sequence[Any], hidden: HiddenVmaps, trace: TraceLevel
) -> TracedResult:
    shape = (*sizes, *one.value.shape)
    value = trace.fake_like(one.value, shape, dense_strides(shape))
    return TracedResult(value, hidden.result_layout(one.stack))
