"""Passes over a program's graph, a file each. A pass changes the graph in place and keeps it
well formed; ``simplify`` runs all of them."""

from __future__ import annotations

import torch.fx

from tsfunc.program.passes.common import merge_common
from tsfunc.program.passes.dead import remove_dead


def simplify(graph: torch.fx.Graph) -> None:
    """Runs every pass and checks the result."""
    merge_common(graph)
    remove_dead(graph)
    graph.lint()


__all__ = ["merge_common", "remove_dead", "simplify"]
