"""Slices to the end, which torch spells in two ways: by None, and by the largest of ints."""

from __future__ import annotations

import sys

import torch
import torch.fx


def end_slices_alike(graph: torch.fx.Graph) -> None:
    """Has every slice that goes to the end say so by None.

    Which of the two comes depends on how torch reads an index, and on whether it has symbols in it.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        if len(node.args) > 3 and type(node.args[3]) is int and node.args[3] == sys.maxsize:
            node.update_arg(3, None)
