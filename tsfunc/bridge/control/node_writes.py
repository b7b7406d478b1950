"""The writes of a trace: the values that its nodes write into, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.trace.graph_nodes import base_node
from tsfunc.bridge.trace.trace_level import TraceTracer
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.operators import (
    STATISTICS,
    TorchOperator,
    objects_in,
    updates_statistics,
)
from tsfunc.bridge.writing.storages import memory_of


def written_by_operator(node: torch.fx.Node, op: TorchOperator) -> Iterator[torch.fx.Node]:
    """Yield the arguments that the call of an operator writes into."""
    if op.name not in STATISTICS or updates_statistics(op.name, node.args):
        for i in op.written:
            if i < len(node.args):
                yield from objects_in(torch.fx.Node, node.args[i])
    for argument, value in op.signature.bind((), node.kwargs):
        if argument.writes:
            yield from objects_in(torch.fx.Node, value)


def written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a call writes into, itself or in a body."""
    if isinstance(node.target, ControlFlow):
        inputs = sorted({i for body in node.target.bodies for i in written_inputs(body)})
        return [value for i in inputs for value in objects_in(torch.fx.Node, node.args[i])]
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator) or not (op.writes or op.name in STATISTICS):
        return []
    return [*written_by_operator(node, op)]


def written_inputs(body: Body) -> set[int]:
    """Return the operands that a body writes into, directly or by a view."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    numbers = dict(zip(inputs, body.inputs, strict=True))
    return {numbers[base] for base in written_bases(body.graph) if base in numbers}


def written_bases(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes whose memory the nodes of a graph write into."""
    return {base_node(value) for node in graph.nodes for value in written_arguments(node)}


def count_writes(node: torch.fx.Node) -> int:
    """Return the number of later nodes that write into the memory of a node's value."""
    base, later, count = base_node(node), node.next, 0
    while later.op != "root":
        count += any(base_node(value) is base for value in written_arguments(later))
        later = later.next
    return count


def physical_tensor(value: Any) -> Any:
    """Return the tensor inside of the batch and grad tracers of a value."""
    return innermost_value(value, BatchTracer | GradTracer)


def memory_key(tensor: torch.Tensor) -> Any:
    """Return the key that tensors with shared memory have in common."""
    inner = physical_tensor(tensor)
    if isinstance(inner, TraceTracer):
        node = base_node(inner.node)
        outside = inner.dispatch_level.tensor_of_input(node)
        return node if outside is None else memory_key(outside)
    return memory_of(inner) or id(inner)
