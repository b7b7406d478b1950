"""Control flow in a trace where each example of a vmap makes its own choice.

The bodies are traced for one example, and the call is a batch of calls, each body of which runs on
an active subset when the program runs: NOTE [hidden vmaps] in ``bridge/control/bodies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsfunc.bridge.control.attempts import CannotUnbatch
from tsfunc.bridge.control.bodies import HiddenVmaps, needed_frames
from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.control.control_flow_calls import call
from tsfunc.bridge.control.subsets import SubsetLevel, refused_write
from tsfunc.bridge.control.traced_bodies import TracedResult
from tsfunc.bridge.trace.trace_level import TraceLevel, current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.tracer_stack import unwrap_all
from tsfunc.ops.dims import dense_strides
from tsfunc.program.passes.effects import is_random, writes
from tsfunc.transforms.control.control_operators import While
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
        tensors: the operands, laid out by `hidden`.
        numbers: the symbolic numbers that follow the tensors.

    Raises:
        CannotUnbatch: a body draws random numbers, or a branch writes into an operand, which
            may be meant for that branch alone.
        RuntimeError: a loop's body writes into a value that it closes over.
    """
    if not hidden.levels:
        return call(op, trace, tensors, numbers, results)
    columns = list(zip(*(hidden.batched_flags(unwrap_all(x)[1]) for x in tensors), strict=True))
    level = next(iter(hidden.levels.values()))
    batched = {i for flags in columns for i, each in enumerate(flags) if each}
    written = {i: by for body in op.bodies for i, by in _written(body).items() if i in batched}
    if isinstance(op, While):
        for i, by in written.items():
            if i >= op.carried:
                raise RuntimeError(refused_write(op.name, by, tuple(tensors[i].shape), level))
    elif written:
        raise CannotUnbatch(level.original.root)
    if any(is_random(node) for body in op.bodies for node in body.graph.nodes):
        raise CannotUnbatch(level.original.root)
    mapped = op
    for flags in reversed(columns):  # the innermost vmap first
        mapped = MappedOperator(mapped, flags)
    sizes = [hidden.levels[depth].batch_size for depth in sorted(hidden.levels)]
    return call(
        mapped, trace, tensors, numbers, [_of_all(r, sizes, hidden, trace) for r in results]
    )


def _written(body: Body) -> dict[int, str]:
    """Return the operands that a body writes into, directly or by a view, and the operators."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    numbers = dict(zip(inputs, body.inputs, strict=True))
    writers: dict[Any, str] = {}
    for node in body.graph.nodes:
        if isinstance(node.target, ControlFlow):
            for inner in node.target.bodies:
                writers |= {_base(node.args[i]): by for i, by in _written(inner).items()}
        elif writes(node):
            writers[_base(node.args[0])] = node.meta["op"].name.removeprefix("aten::")
    return {numbers[node]: by for node, by in writers.items() if node in numbers}


def _base(node: Any) -> Any:
    """Return the node whose memory a node shares."""
    op = node.meta.get("op")
    while isinstance(op, TorchOperator) and (op.is_view or op.writes):
        node = node.args[0]
        op = node.meta.get("op")
    return node


def _of_all(
    one: TracedResult, sizes: Sequence[Any], hidden: HiddenVmaps, trace: TraceLevel
) -> TracedResult:
    shape = (*sizes, *one.value.shape)
    value = trace.fake_like(one.value, shape, dense_strides(shape))
    return TracedResult(value, hidden.result_layout(one.stack))
