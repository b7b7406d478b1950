"""Removal of unused arguments and results of control-flow bodies.

The removal of an argument changes a body and its call. The graph is well formed at each step: the
new body is a copy of the old one with fewer arguments and results, and the call is then replaced
by a call of the new operator. Each kind of control flow determines the arguments and results that
it does not need (``ControlFlow.narrowed``). For example, a loop does not need a carry that only
affects itself.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.program.passes.common import merge_common
from tsfunc.program.passes.dead import remove_dead
from tsfunc.program.passes.effects import checks, is_random, writes


def remove_unused_of_blocks(graph: torch.fx.Graph) -> None:
    """Remove unused arguments and results of each body in the graph, and in nested bodies."""
    for node in reversed(list(graph.nodes)):
        if not isinstance(node.target, ControlFlow):
            continue
        for body in node.target.bodies:
            merge_common(body.graph)
            remove_unused_of_blocks(body.graph)
            remove_dead(body.graph)
        _narrow(graph, node, node.target)


def _narrow(graph: torch.fx.Graph, node: torch.fx.Node, op: ControlFlow) -> None:
    if any(user.target is not operator.getitem for user in node.users):
        return
    for user in list(node.users):
        if not user.users:
            graph.erase_node(user)
    found = op.narrowed(len(node.args), {user.args[1] for user in node.users})  # type: ignore[misc]
    if found is None:
        return
    with graph.inserting_before(node):
        new = graph.call_function(found.op, tuple(node.args[i] for i in found.operands))
    new.meta = dict(node.meta)
    for user in list(node.users):
        user.args = (new, found.results.index(user.args[1]))
    graph.erase_node(node)


def live_inputs(body: Body, results: Collection[int]) -> set[int]:
    """Return the indices of the operands that some results of a body, or its effects, depend on."""
    live = _live(body, results)
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    return {at for node, at in zip(inputs, body.inputs, strict=True) if node in live}


def narrowed_body(body: Body, results: Collection[int], numbers: Mapping[int, int]) -> Body:
    """Return a body with fewer arguments and results that computes the same.

    Args:
        body: the body, which is not changed.
        results: the indices of the results that are kept.
        numbers: the new indices of the operands that these results depend on.
    """
    live = _live(body, results)
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[int] = []
    operands = iter(body.inputs)
    for node in body.graph.nodes:
        at = next(operands) if node.op == "placeholder" else None
        if node.op == "output":
            graph.output(tuple(values[node.args[0][i]] for i in sorted(results)))
        elif node in live:
            values[node] = graph.node_copy(node, values.__getitem__)
            if at is not None:
                inputs.append(numbers[at])
    return Body(body.name, graph, tuple(inputs))


def _live(body: Body, results: Collection[int]) -> set[torch.fx.Node]:
    nodes = list(body.graph.nodes)
    returned = nodes[-1].args[0]
    live = {returned[i] for i in results}
    for node in reversed(nodes[:-1]):
        if node in live or writes(node) or is_random(node) or checks(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live
