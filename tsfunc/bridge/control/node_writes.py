"""The memory of a graph's values: those that may share it, and those that nodes write into."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator
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
)
from tsfunc.bridge.writing.storages import memory_of

Sharing = Callable[[torch.fx.Node], Iterable[torch.fx.Node]]


# Views that autograd takes for tensors of their own: their schemas declare no aliases.
_UNDECLARED = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "unsafe_chunk", "unsafe_split.Tensor", "unsafe_split_with_sizes")
)


# Composite operators whose results always have memory of their own.
NEW_MEMORY = frozenset(
    f"aten::{name}"
    for name in """matmul linear bilinear outer inner kron square absolute negative divide.Tensor
    divide.Scalar multiply.Tensor multiply.Scalar subtract.Tensor subtract.Scalar
    true_divide.Tensor true_divide.Scalar softmax.int log_softmax.int layer_norm group_norm
    rms_norm conv1d conv2d conv3d where.Scalar where.ScalarSelf where.ScalarOther std std.dim var
    var.dim concat hstack vstack cosine_similarity cross_entropy_loss""".split()
)


def possibly_shared(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the arguments of a call whose memory its results may share."""
    if node.op != "call_function" or "expr" in node.meta:
        return
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator):
        if isinstance(node.target, ControlFlow) or node.target is operator.getitem:
            yield from node.all_input_nodes
        return
    if op.name in _UNDECLARED:
        yield from objects_in(torch.fx.Node, node.args[0])
        return
    if not declares_sharing(op):
        if op.composite and op.name not in NEW_MEMORY:
            # A composite operator may return its argument without declaring it (dropout).
            yield from node.all_input_nodes
        return
    for argument, value in op.signature.bind(node.args, node.kwargs):
        if argument.aliased:
            yield from objects_in(torch.fx.Node, value)


@functools.cache
def declares_sharing(op: TorchOperator) -> bool:
    """True if an operator declares that a result may share the memory of an argument."""
    return any(argument.aliased for argument in op.signature.arguments)


def reach_back(
    node: torch.fx.Node, visited: Container[torch.fx.Node] = (), sharing: Sharing = possibly_shared
) -> set[torch.fx.Node]:
    """Return a value and the values before it that may share its memory.

    Args:
        visited: values whose sources are not visited again.
        sharing: yields the arguments of a call whose memory its results may share.
    """
    reached, waiting = {node}, [node]
    while waiting:
        for source in sharing(waiting.pop()):
            if source not in reached and source not in visited:
                reached.add(source)
                waiting.append(source)
    return reached


# --- writes


def written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a call writes into, itself or in a body."""
    if isinstance(node.target, ControlFlow):
        inputs = sorted({i for body in node.target.bodies for i in written_inputs(body)})
        return [value for i in inputs for value in objects_in(torch.fx.Node, node.args[i])]
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator) or not (op.writes or op.name in STATISTICS):
        return []
    values = [value for argument, value in op.signature.bind((), node.kwargs) if argument.writes]
    values += [node.args[i] for i in op.written_by_call(node.args) if i < len(node.args)]
    return [*objects_in(torch.fx.Node, values)]


def written_inputs(body: Body) -> set[int]:
    """Return the operands whose memory a body may write into."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    numbers = dict(zip(inputs, body.inputs, strict=True))
    written = [value for node in body.graph.nodes for value in written_arguments(node)]
    return {numbers[node] for value in written for node in reach_back(value) if node in numbers}


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
