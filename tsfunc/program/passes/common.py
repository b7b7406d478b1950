"""Common subexpressions: what is computed twice from the same values is computed once."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from tsfunc.program.passes.effects import is_pure, writes


def merge_common(graph: torch.fx.Graph) -> None:
    """Merges equal pure nodes.

    A graph that writes into tensors is left alone: equal calls before and after a write differ,
    and two equal results may be written to apart.
    """
    if any(writes(node) for node in graph.nodes):
        return
    seen: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        if not is_pure(node):
            continue
        key = _key(node)
        known = seen.setdefault(key, node) if key is not None else node
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _key(node: torch.fx.Node) -> Any:
    """What makes a call equal to another; None where an argument can't be compared."""
    try:
        quiet = node.meta.get("no_grad", False)
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), quiet)
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ("list", *(_frozen(item) for item in value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    # 1, 1.0 and True are equal and hash alike, but are not the same argument; nor are 0.0 and -0.0.
    return (type(value).__name__, repr(value)) if isinstance(value, int | float) else value
