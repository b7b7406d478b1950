"""The nodes of a trace: their names, and the memory of their values.

The names are those that torch.fx gives, in a third of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any

import torch.fx
from torch._ops import OpOverload
from torch.fx.graph import _Namespace

from tsfunc.bridge.tracers.operators import operator_of

_names: dict[int, str] = {}  # by the ids of overloads, which live as long as torch


def name_of(target: Callable[..., Any]) -> str | None:
    """Return the name that torch.fx would give the first call of an overload; else None."""
    if not isinstance(target, OpOverload):
        return None
    name = _names.get(id(target))
    if name is None:
        operator_of(target)  # keeps the overload alive
        name = _names[id(target)] = torch.fx.Graph().call_function(target).name
    return name


class NodeNames(_Namespace):
    """The names of one graph. A name without a number gets its next number without parsing."""

    def create_name(self, candidate: str, obj: object | None) -> str:
        number = self._base_count.get(candidate)
        if (
            number is None
            or obj is not None
            or candidate not in self._used_names
            or candidate[-1].isdigit()
        ):
            return super().create_name(candidate, obj)
        name = candidate
        while name in self._used_names:
            number += 1
            name = f"{candidate}_{number}"
        self._used_names.add(name)
        self._base_count[candidate] = number
        return name


def named_graph() -> torch.fx.Graph:
    """Return an empty graph with ``NodeNames``."""
    graph = torch.fx.Graph()
    graph._graph_namespace = NodeNames()
    return graph


# --- memory


def base_node(node: torch.fx.Node, copies: Container[str] = ()) -> torch.fx.Node:
    """Return the node whose memory a node's result has, through views and in-place operators.

    Args:
        copies: the names of operators whose results count as tensors of their own.
    """
    while node.args and isinstance(source := node.args[0], torch.fx.Node):
        op = node.meta.get("op")
        shares = node.target is operator.getitem if op is None else op.is_view or op.inplace
        if not shares or (op is not None and op.name in copies):
            break
        node = source
    return node
