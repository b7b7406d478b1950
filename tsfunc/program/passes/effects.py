"""Facts about the nodes of a graph: effects, and values that share memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.control.node_writes import written_by_operator
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.tracers.operators import (
    STATISTICS,
    TorchOperator,
    may_draw,
    objects_in,
    updates_statistics,
)

# --- the nodes of a graph


def every_node(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the nodes of a graph, and those of the bodies in it, each body's after its call."""
    nodes = list(graph.nodes)
    if not any(issubclass(kind, ControlFlow) for kind in {type(node.target) for node in nodes}):
        return nodes
    every: list[torch.fx.Node] = []
    for node in nodes:
        every.append(node)
        if isinstance(node.target, ControlFlow):
            for body in node.target.bodies:
                every += every_node(body.graph)
    return every


def node_of_each_target(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return one node for each target: a graph has fewer targets than nodes."""
    return list({id(node.target): node for node in nodes}.values())


# --- effects of a graph's nodes: writes, random numbers, checks and communication


def writes(node: torch.fx.Node) -> bool:
    """True if the node writes into one of its arguments."""
    if isinstance(node.target, ControlFlow):
        return any(writes(inner) for inner in _inner(node.target))
    op = node.meta.get("op")
    if op is not None and op.name in STATISTICS:
        return updates_statistics(op.name, node.args)
    return bool(op is not None and op.writes)


def is_random(node: torch.fx.Node) -> bool:
    """True if two calls of the node may give different results."""
    if isinstance(node.target, ControlFlow):
        return node.target.opaque or node.target.random
    op = node.meta.get("op")
    return isinstance(op, TorchOperator) and may_draw(op, node.args, node.kwargs)


def checks(node: torch.fx.Node) -> bool:
    """True if the node makes an assertion when the program runs."""
    if isinstance(node.target, ControlFlow):
        return any(checks(inner) for inner in _inner(node.target))
    op = node.meta.get("op")
    return node.target is check_size or bool(op is not None and op.asserts)


def _inner(op: ControlFlow) -> Iterator[torch.fx.Node]:
    for body in op.bodies:
        yield from body.graph.nodes


def is_pure(node: torch.fx.Node) -> bool:
    """True if the node's result depends only on its arguments, and it has no effects.

    The handler of a user's class may do anything.
    """
    op = node.meta.get("op")
    if "call" in node.meta:
        return False
    if isinstance(op, TorchOperator) and op.name not in STATISTICS:
        return not (op.writes or op.asserts or may_draw(op, node.args, node.kwargs))
    return node.op == "call_function" and not (writes(node) or is_random(node) or checks(node))


def communicates(node: torch.fx.Node) -> bool:
    """True if the node exchanges values with other processes, or reads this one's rank."""
    namespace = getattr(node.target, "namespace", None)
    return namespace in ("tsfunc_mesh", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def is_view(node: torch.fx.Node) -> bool:
    """True if a node calls an operator that returns a view."""
    op = node.meta.get("op")
    return isinstance(op, TorchOperator) and op.is_view


# --- aliases among the values of a graph, the values that are written to, and those that escape


Sharing = Callable[[torch.fx.Node], Iterable[torch.fx.Node]]


class Aliases:
    """The memory of a graph's values, as sets of values that may share it.

    All closed-over values (inputs, lifted tensors) may share one memory. A pass that replaces a
    value records it (``replace``), so that the next pass can use the same sets.

    Args:
        sharing: yields the arguments of a call whose memory its results may share; by default
            ``possibly_shared``.
    """

    def __init__(self, graph: torch.fx.Graph, sharing: Sharing | None = None) -> None:
        self._sharing = sharing or possibly_shared
        self._parent: dict[Any, Any] = {}
        self._escaping: set[torch.fx.Node] = set()
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._join(node, _OUTSIDE)
            for source in self._sharing(node):
                self._join(node, source)
        self._written = {
            self.memory(target)
            for node in graph.nodes
            if writes(node)
            for target in possibly_written(node)
        }
        for node in reversed(graph.nodes):
            if node.op == "output":
                self._escaping.update(node.all_input_nodes)
            elif node in self._escaping:
                self._escaping.update(self._sharing(node))

    def memory(self, node: Any) -> Any:
        """Return a representative, which is the same for all values that may share memory."""
        parent = self._parent
        while (above := parent.get(node)) is not None:
            further = parent.get(above)
            if further is None:
                return above
            parent[node] = further  # path compression: without it, long chains take quadratic time
            node = further
        return node

    def is_written(self, node: torch.fx.Node) -> bool:
        """True if a node writes into memory that the value may share."""
        return bool(self._written) and self.memory(node) in self._written

    def is_from_outside(self, node: torch.fx.Node) -> bool:
        """True if the value may share memory with a closed-over value."""
        return self.memory(node) is self.memory(_OUTSIDE)

    def escapes(self, node: torch.fx.Node) -> bool:
        """True if the caller may get the value's memory as a result."""
        return node in self._escaping

    def replace(self, node: torch.fx.Node, other: torch.fx.Node) -> None:
        """Replace a value by an equal one in the graph, and record that its memory is the other's.

        If the caller gets the value, it gets the other one now.
        """
        node.replace_all_uses_with(other)
        node.graph.erase_node(node)
        written = self.is_written(node)
        self._join(node, other)
        if written:
            self._written.add(self.memory(other))
        if node in self._escaping:
            self.leaves(other)

    def leaves(self, node: torch.fx.Node) -> None:
        """Record that the caller gets a value, and the values that may share its memory."""
        self._escaping.update(_reach_back(node, self._escaping, self._sharing))

    def _join(self, one: Any, other: Any) -> None:
        left, right = self.memory(one), self.memory(other)
        if left is not right:
            self._parent[left] = right


_OUTSIDE = "outside"
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


def sources(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the values from outside of the graph that may share memory with a value."""
    return {source for source in _reach_back(node, ()) if source.op in ("placeholder", "get_attr")}


def _reach_back(
    node: torch.fx.Node, visited: Container[torch.fx.Node], sharing: Sharing = possibly_shared
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


def possibly_written(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the arguments that a call writes into; for control flow, all arguments."""
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator):
        yield from node.all_input_nodes
    else:
        yield from written_by_operator(node, op)
