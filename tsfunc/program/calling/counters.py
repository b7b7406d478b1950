"""Questions about counters: tensors of one number that a function keeps outside.

NOTE [counters of optimizers]
An optimizer counts its steps in a tensor, ``state["step"]``, and takes branches by the count
(``if rho_t > 5``). A trace has no data in general, but such a tensor is small, is on the CPU and
is there before the call. If a value depends on such tensors only, the trace computes it from
their current values, and the guard of later calls computes it again: the part of the graph that
leads to the value becomes a function of the guard. The writes of the function before the read
are part of it, and act on copies. Arguments do not count: their data is what a program is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.control.node_writes import written_arguments
from tsfunc.bridge.trace.graph_nodes import base_node
from tsfunc.bridge.trace.trace_level import TraceLevel
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.torch_settings import outside_all_modes
from tsfunc.bridge.tracers.user_queries import statically_known_true
from tsfunc.program.closure.closure_guards import ResultIs
from tsfunc.program.closure.guard_builder import GuardBuilder
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.guard import Source
from tsfunc.program.passes.effects import checks, communicates, is_random


def counter_value(level: TraceLevel, builder: GuardBuilder, node: torch.fx.Node) -> Any:
    """Return a value that depends on tensors of one closed-over number only, and guard it.

    Args:
        builder: the values that it has read.
        node: the node whose value the function reads.

    Returns:
        The value of the node as a Python number, which is guarded; None if it is not known.
    """
    graph = level.graph
    sources = dict(_counters(level))
    computable = _computable_nodes(graph, sources)
    if node.graph is not graph or node not in computable:
        return None
    nodes = _leading_to(node, computable)
    roots = [other for other in nodes if other in sources]
    compute = NodeFunction(node, nodes, roots)
    counters = [sources[root] for root in roots]
    value = compute(*counters)
    counter_sources = [builder.source_of(x) or Source.of_object(x, "a tensor") for x in counters]
    name = "the number computed from closed-over tensors"
    builder.guards_of(True).add(ResultIs(compute, tuple(counter_sources), value, name))
    return value


def _counters(level: TraceLevel) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """Yield the tensors of one closed-over number that the trace has read, by their nodes."""
    for tensor, tracer in level.lifted.values():
        is_counter = tensor.numel() == 1 and tensor.device.type == "cpu"
        if is_counter and not tensor.requires_grad and type(tensor) is torch.Tensor:
            yield tracer.node, tensor


class NodeFunction:
    """The value of a node of a graph, as a function of the tensors that it depends on.

    Args:
        nodes: the nodes that lead to it, in order.
        roots: those among them that are closed-over tensors.
    """

    def __init__(
        self, node: torch.fx.Node, nodes: Sequence[torch.fx.Node], roots: Sequence[torch.fx.Node]
    ) -> None:
        graph = torch.fx.Graph()
        positions = {root: graph.placeholder(root.name) for root in roots}
        for other in nodes:
            if other not in positions:
                positions[other] = graph.node_copy(other, positions.__getitem__)
        graph.output((positions[node],))
        _, self._run = generate("answer", graph, range(len(roots)), {})

    def __call__(self, *counters: torch.Tensor) -> Any:
        """Return the value for the current values of the tensors."""
        with torch_state.outside_all_transforms(), outside_all_modes(), torch.no_grad():
            (value,) = self._run([counter.clone() for counter in counters])
            return value.item() if isinstance(value, torch.Tensor) else value


def _computable_nodes(
    graph: torch.fx.Graph, sources: Mapping[torch.fx.Node, torch.Tensor]
) -> set[torch.fx.Node]:
    """Return the nodes that depend on the sources only.

    Memory that others write into is not known: the moments of a parameter of one element are
    tensors of one number, and follow from the gradient.
    """
    others: set[torch.fx.Node] = set()
    while True:
        computable: set[torch.fx.Node] = {other for other in sources if other not in others}
        written: set[torch.fx.Node] = set()
        for node in graph.nodes:
            if node.op != "call_function" or checks(node):
                continue
            opaque = isinstance(node.target, ControlFlow) or is_random(node) or communicates(node)
            inputs = node.all_input_nodes
            if opaque or not all(other in computable for other in inputs) or not _is_small(node):
                written |= {
                    base_node(other) for other in written_arguments(node) if other in computable
                }
            elif base_node(node) not in others:
                computable.add(node)
        if written <= others:
            return computable
        others |= written


def _is_small(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or statically_known_true(value.numel() == 1)


def _leading_to(node: torch.fx.Node, computable: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the nodes that a node depends on, in order, with the writes before it."""
    order = [other for other in node.graph.nodes if other in computable]
    order = order[: order.index(node) + 1]
    needed = {node}
    memories: set[torch.fx.Node] = set()
    while True:
        count = len(needed)
        for other in reversed(order):
            if other in needed or not memories.isdisjoint(map(base_node, written_arguments(other))):
                needed |= {other, *other.all_input_nodes}
                memories |= {base_node(x) for x in (other, *other.all_input_nodes)}
        if len(needed) == count:
            return [other for other in order if other in needed]
