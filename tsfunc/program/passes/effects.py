"""Effects of a graph's nodes: writes, random numbers, checks and communication."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.tracers.operators import STATISTICS, updates_statistics


def writes(node: torch.fx.Node) -> bool:
    """Return True if the node writes into one of its arguments."""
    if isinstance(node.target, ControlFlow):
        return any(writes(inner) for inner in _inner(node.target))
    op = node.meta.get("op")
    if op is not None and op.name in STATISTICS:
        return updates_statistics(op.name, node.args)
    return bool(op is not None and op.writes)


def is_random(node: torch.fx.Node) -> bool:
    """Return True if two calls of the node may give different results."""
    if isinstance(node.target, ControlFlow):
        return node.target.opaque or node.target.random
    op = node.meta.get("op")
    return bool(op is not None and torch.Tag.nondeterministic_seeded in op.overload.tags)


def checks(node: torch.fx.Node) -> bool:
    """Return True if the node makes an assertion when the program runs."""
    if isinstance(node.target, ControlFlow):
        return any(checks(inner) for inner in _inner(node.target))
    op = node.meta.get("op")
    return node.target is check_size or bool(op is not None and op.asserts)


def _inner(op: ControlFlow) -> Iterator[torch.fx.Node]:
    for body in op.bodies:
        yield from body.graph.nodes


def is_pure(node: torch.fx.Node) -> bool:
    """Return True if the node's result depends only on its arguments, and it has no effects."""
    return node.op == "call_function" and not (writes(node) or is_random(node) or checks(node))


def communicates(node: torch.fx.Node) -> bool:
    """Return True if the node exchanges values with other processes, or reads this one's rank."""
    namespace = getattr(node.target, "namespace", None)
    return namespace in ("tsfunc_mesh", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
