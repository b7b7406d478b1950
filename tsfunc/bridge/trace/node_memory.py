"""The memory of a trace's values: the value that another one is a view of."""

from __future__ import annotations

import operator
from collections.abc import Container

import torch.fx


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
