"""Which nodes of a graph do more than compute a value."""

from __future__ import annotations

import torch
import torch.fx


def writes(node: torch.fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    op = node.meta.get("op")
    return bool(op is not None and op.writes)


def is_random(node: torch.fx.Node) -> bool:
    """Whether two calls of the node give different results."""
    op = node.meta.get("op")
    return bool(op is not None and torch.Tag.nondeterministic_seeded in op.overload.tags)


def is_pure(node: torch.fx.Node) -> bool:
    """Whether the node's result depends on its arguments alone, and nothing else happens."""
    return node.op == "call_function" and not writes(node) and not is_random(node)
