"""Slices to the end of a dim, which torch writes as None or as the largest int."""

from __future__ import annotations

import sys

import torch
import torch.fx


def end_slices_alike(graph: torch.fx.Graph) -> None:
    """Write the end of every slice to the end of a dim as None.

    torch writes the largest int or None, depending on how it parses an index and on its symbols.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        if len(node.args) > 3 and type(node.args[3]) is int and node.args[3] == sys.maxsize:
            node.update_arg(3, None)
