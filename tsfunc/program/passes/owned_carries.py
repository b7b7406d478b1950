"""Loops that own their carry, and write into it without a copy in each step.

NOTE [owned carries]
The body of a loop writes into copies of its arguments (NOTE [bodies without writes] in
``bridge/control/traced_bodies``). A loop that fills a part of a buffer in each step would copy the
buffer in each step. But once the first carry is copied, the memory of each carry belongs to the
loop alone, if the body's result shares memory with no other result and with no tensor from outside.
In that case the body may write into the carry itself. A vmap or a derivative of a step, and
autograd, which saves values of each step, use the body with copies.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import Body
from tsfunc.program.passes.effects import Aliases


def owned_carries(body: Body, carried: int) -> dict[int, torch.fx.Node]:
    """Return the positions in the carry that a body may write into, each with its copy.

    Args:
        carried: the number of tensors in the carry, the first operands and results of the body.
    """
    *_, last = body.graph.nodes
    results: Any = last.args[0]
    numbers = iter(body.inputs)
    positions = {node: next(numbers) for node in body.graph.nodes if node.op == "placeholder"}
    copies = {
        positions[argument]: node
        for node in body.graph.nodes
        if (argument := _copied_node(node)) in positions and positions[argument] < carried
    }
    if not copies:
        return {}
    aliases = Aliases(body.graph)
    memories = [aliases.memory(result) for result in results]
    counts = Counter(memories)
    others = set(memories[carried:])
    return {
        i: copy
        for i, copy in copies.items()
        if counts[memories[i]] == 1
        and not aliases.is_from_outside(results[i])
        and counts[aliases.memory(copy)] <= 1
        and aliases.memory(copy) not in others
    }


def _copied_node(node: torch.fx.Node) -> Any:
    """Return the node that a call copies, if nothing else uses that node; else None."""
    if node.target is not torch.ops.aten.clone.default or node.kwargs or len(node.args) != 1:
        return None
    (argument,) = node.args
    return argument if isinstance(argument, torch.fx.Node) and len(argument.users) == 1 else None


def without_copies(body: Body, copies: dict[int, torch.fx.Node]) -> torch.fx.Graph:
    """Return the graph of a body that writes into these operands of its carry themselves."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    removed = set(copies.values())
    for node in body.graph.nodes:
        if node in removed:
            values[node] = values[node.args[0]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return graph
