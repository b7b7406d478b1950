"""Views of values whose layout in memory is known when the program runs.

NOTE [layouts of control flow]
A trace knows each value by one that lies in memory as it will. Not so around control flow: what a
body returns lies as the branch that is taken has it, a carry as the last step has left it, and a
derivative as autograd has it. Autograd, where it is inside of the trace, makes a ``view`` of a
``reshape`` where the value that it sees can be viewed so. Another layout can't, and is copied by a
``reshape``, which is what the user's function does.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.program.passes.aliases import Aliases

_VIEWS: Final = frozenset({"aten::view", "aten::_unsafe_view"})


def free_layouts(graph: torch.fx.Graph, body: bool = False) -> None:
    """Makes views in a graph with control flow, and in its bodies, copy where they must.

    A view that is written through stays one.

    Args:
        graph: the graph.
        body: whether it is a body of control flow.
    """
    calls = [node.target for node in graph.nodes if isinstance(node.target, ControlFlow)]
    for call in calls:
        for each in call.bodies:
            free_layouts(each.graph, True)
    if not calls and not body:
        return
    aliases = Aliases(graph)
    reshape = torch.ops.aten.reshape.default
    for node in graph.nodes:
        op = node.meta.get("op")
        if isinstance(op, TorchOperator) and op.name in _VIEWS and not aliases.is_written(node):
            node.target, node.meta["op"] = reshape, operator_of(reshape)
