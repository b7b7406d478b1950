"""Facts about the nodes of a graph: effects, and values that share memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.control.node_writes import (
    Sharing,
    possibly_shared,
    reach_back,
    written_arguments,
)
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.tracers.operators import (
    STATISTICS,
    TorchOperator,
    may_draw,
    objects_in,
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
    return bool(written_arguments(node))


def is_random(node: torch.fx.Node) -> bool:
    """True if two calls of the node may give different results."""
    if isinstance(node.target, ControlFlow):
        return node.target.opaque or node.target.random
    op = node.meta.get("op")
    return isinstance(op, TorchOperator) and may_draw(op, node.args, node.kwargs)


def checks(node: torch.fx.Node) -> bool:
    """True if the node makes an assertion when the program runs."""
    if isinstance(node.target, ControlFlow):
        return any(checks(inner) for body in node.target.bodies for inner in body.graph.nodes)
    op = node.meta.get("op")
    return node.target is check_size or bool(op is not None and op.asserts)


def selects_by_mask(node: torch.fx.Node) -> bool:
    """True if the node is ``x[mask]``, whose size depends on data."""
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator) or op.name != "aten::index.Tensor" or node.kwargs:
        return False
    indices = [index.meta.get("val") for index in objects_in(torch.fx.Node, node.args[1])]
    return any(isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in indices)


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
            self.memory(target) for node in graph.nodes for target in written_arguments(node)
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
        self._escaping.update(reach_back(node, self._escaping, self._sharing))

    def _join(self, one: Any, other: Any) -> None:
        left, right = self.memory(one), self.memory(other)
        if left is not right:
            self._parent[left] = right


_OUTSIDE = "outside"


def sources(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the values from outside of the graph that may share memory with a value."""
    return {source for source in reach_back(node) if source.op in ("placeholder", "get_attr")}
