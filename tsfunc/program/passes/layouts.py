"""Views of values whose memory layout is known only when the program runs.

NOTE [layouts of control flow]
The fake value of a node has the memory layout that the node's value has at run time. Control flow
is an exception: the result of a body has the layout of the branch that runs, a carry has the
layout of the last step, and a derivative the layout that autograd gives it. Inside of a trace,
autograd turns a ``reshape`` into a ``view`` if the value in the trace can be viewed. With another
layout at run time the ``view`` fails, and a ``reshape`` copies, as it does in the user's function.
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
    """Turn views into reshapes in a graph with control flow and in its bodies.

    A view that is written to stays a view.

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
