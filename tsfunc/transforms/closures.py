"""Functions with their closed-over tensors as arguments.

NOTE [closed-over tensors]
An ``autograd.Function`` gives gradients to its arguments only, and runs again at every level
outside of its call, perhaps after that level has ended. The closed-over tensors of a function that
it calls must therefore be among its arguments. The function is traced once, on the types of its
own arguments and inside of all levels, and then runs as the traced graph, which takes only
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import detach_at_level
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.trace.lifted_tensors import Lifting
from tsfunc.bridge.trace.trace_level import TraceLevel, current_trace, node_of_output
from tsfunc.bridge.tracers.registrations import watching_factories, watching_random
from tsfunc.bridge.tracers.torch_settings import traces_compile
from tsfunc.bridge.tracers.torch_state import outside_all_transforms
from tsfunc.program.graphs.codegen import generate


@dataclass(frozen=True)
class ClosureConverted:
    """A traced function of tensors.

    Attributes:
        run: takes the function's own arguments and then ``closed``; returns the flattened results.
        closed: the closed-over tensors, and the symbolic sizes.
        tree: the structure of the results.
        graph: the graph that ``run`` computes.
    """

    run: Callable[..., Sequence[Any]]
    closed: tuple[Any, ...]
    tree: Any
    graph: torch.fx.Graph


def convert_closure(
    label: str, func: Callable[..., Any], examples: Sequence[torch.Tensor]
) -> ClosureConverted:
    """Trace a function of tensors with the types of ``examples``.

    Raises:
        DataDependentError: the function uses a tensor as a Python number or bool.
    """
    around = current_trace()
    symbols = Symbols({}) if around is None else around.symbols
    numbers: dict[str, tuple[Any, torch.fx.Node]] = {}

    def number(value: Any) -> torch.fx.Node:
        entry = numbers.get(str(value))
        if entry is None:
            with level.graph.inserting_before(next(iter(level.graph.nodes))):
                node = level.graph.placeholder(f"n{len(numbers)}")
            entry = numbers[str(value)] = value, node
        return entry[1]

    with outside_all_transforms():
        level = TraceLevel(label, symbols)
        level.number_nodes = number
        with traces_compile(), level, watching_random(), watching_factories():
            inputs = [
                level.input(f"x{i}", level.fake_like(x, x.shape, x.stride()), x.requires_grad)
                for i, x in enumerate(examples)
            ]
            with Lifting(level):
                leaves, tree = pytrees.flatten(func(*inputs))
        level.graph.output(tuple(node_of_output(leaf, level) for leaf in leaves))
    tensors = [(_as_used(x, tracer.node), tracer.node) for x, tracer in level.lifted.values()]
    closed = [*tensors, *numbers.values()]
    input_nodes = [*(x.node for x in inputs), *(node for _, node in closed)]
    graph = _of_inputs(level.graph, input_nodes)
    _, function = generate(label, graph, range(len(input_nodes)), {})
    return ClosureConverted(
        lambda *x: function(x), tuple(value for value, _ in closed), tree, graph
    )


def _as_used(tensor: torch.Tensor, node: torch.fx.Node) -> torch.Tensor:
    """Return a closed-over tensor, without its graph if only ``no_grad`` blocks use it.

    A tensor with its graph would make results require gradients that they do not have.
    """
    if all(user.meta.get("no_grad", False) for user in node.users):
        return detach_at_level(tensor)
    return tensor


def _of_inputs(graph: torch.fx.Graph, inputs: Sequence[torch.fx.Node]) -> torch.fx.Graph:
    """Return a copy of a graph in which the given nodes are the inputs."""
    copy = torch.fx.Graph()
    positions = {node: copy.placeholder(node.name) for node in inputs}
    for node in graph.nodes:
        if node not in positions:
            positions[node] = copy.node_copy(node, positions.__getitem__)
    return copy
