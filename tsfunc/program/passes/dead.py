"""Dead code: nodes whose results nobody uses."""

from __future__ import annotations

import torch.fx

from tsfunc.program.passes.effects import checks, is_random, writes


def remove_dead(graph: torch.fx.Graph) -> None:
    """Removes nodes without users, but for inputs, checks, and what writes or draws random numbers.

    A random operator stays although its result is unused: it moves the generator on, and what
    the function draws after it is to be what it would be without a program.
    """
    for node in reversed(graph.nodes):
        removable = node.op in ("call_function", "get_attr")
        kept = writes(node) or is_random(node) or checks(node)
        if removable and not node.users and not kept:
            graph.erase_node(node)
