"""Which nodes of a graph do more than compute a value."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.tracers.operators import STATISTICS, updates_statistics


def writes(node: torch.fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    if isinstance(node.target, ControlFlow):
        return any(writes(inner) for inner in _inner(node.target))
    op = node.meta.get("op")
    if op is not None and op.name in STATISTICS:
        return updates_statistics(op.name, node.args)
    return bool(op is not None and op.writes)


def is_random(node: torch.fx.Node) -> bool:
    """Whether two calls of the node give different results."""
    if isinstance(node.target, ControlFlow):
        return node.target.opaque or node.target.random
    op = node.meta.get("op")
    return bool(op is not None and torch.Tag.nondeterministic_seeded in op.overload.tags)


def checks(node: torch.fx.Node) -> bool:
    """Whether the node asserts something when the program runs."""
    if isinstance(node.target, ControlFlow):
        return any(checks(inner) for inner in _inner(node.target))
    op = node.meta.get("op")
    return node.target is check_size or bool(op is not None and op.asserts)


def _inner(op: ControlFlow) -> Iterator[torch.fx.Node]:
    for body in op.bodies:
        yield from body.graph.nodes


def is_pure(node: torch.fx.Node) -> bool:
    """Whether the node's result depends on its arguments alone, and nothing else happens."""
    return node.op == "call_function" and not (writes(node) or is_random(node) or checks(node))


def communicates(node: torch.fx.Node) -> bool:
    """Whether the node exchanges values with other processes, or asks for this one's place."""
    namespace = getattr(node.target, "namespace", None)
    return namespace in ("tsfunc_mesh", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
