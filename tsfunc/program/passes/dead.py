"""Dead code: nodes whose results are not used."""

from __future__ import annotations

import torch.fx

from tsfunc.program.passes.effects import checks, is_random, writes


def remove_dead(graph: torch.fx.Graph) -> None:
    """Remove nodes without users, except inputs, checks, writes and random operators.

    A random operator stays even if its result is unused, since it advances the generator: later
    draws of the function must be the same as without a program.
    """
    for node in reversed(graph.nodes):
        removable = node.op in ("call_function", "get_attr")
        kept = writes(node) or is_random(node) or checks(node)
        if removable and not node.users and not kept:
            graph.erase_node(node)
