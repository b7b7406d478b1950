"""The graph of a program as a ``torch.fx.GraphModule``, which torch's own tools take."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.fx

from tsfunc.bridge.tracers.torch_state import set_grad_mode


def graph_module(
    name: str, graph: torch.fx.Graph, lifted: Mapping[str, torch.Tensor], as_inputs: bool = False
) -> torch.fx.GraphModule:
    """Return a module that runs a graph on its inputs and returns its results as a tuple.

    Args:
        name: the name of the module's class.
        lifted: the tensors of the graph's ``get_attr`` nodes. The same tensors become parameters
            and buffers of the module.
        as_inputs: True if they become inputs instead, after the others.
    """
    root = torch.nn.Module()
    copy = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    outside = [node for node in graph.nodes if node.op == "get_attr"]
    for node in () if as_inputs else outside:
        _add(root, str(node.target), lifted[str(node.target)])
    for node in [*inputs, *(outside if as_inputs else ())]:
        values[node] = copy.placeholder(node.name)
        values[node].meta = dict(node.meta)
    mode = _GradMode(copy)
    for node in graph.nodes:
        if node in values:
            continue
        if node.op != "get_attr":
            mode.switch(bool(node.meta.get("no_grad")))
        values[node] = copy.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
    name_generators(root, copy)
    return torch.fx.GraphModule(root, copy, name)


def name_generators(root: torch.nn.Module, graph: torch.fx.Graph) -> bool:
    """Make the generators that calls take attributes, since torch writes calls as Python.

    Returns:
        True if there are any.
    """
    names: dict[int, str] = {}
    for node in list(graph.nodes):
        for key, value in [*enumerate(node.args), *node.kwargs.items()]:
            if not isinstance(value, torch.Generator):
                continue
            name = names.get(id(value))
            if name is None:
                free = (f"_generator_{i}" for i in itertools.count())
                name = names[id(value)] = next(each for each in free if not hasattr(root, each))
                setattr(root, name, value)
            with graph.inserting_before(node):
                attribute = graph.create_node("get_attr", name)
            if isinstance(key, int):
                node.update_arg(key, attribute)
            else:
                node.update_kwarg(key, attribute)
    return bool(names)


def _add(root: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, torch.nn.Parameter):
        root.register_parameter(name, tensor)
    else:
        root.register_buffer(name, tensor)


class _GradMode:
    """Writes no_grad blocks into a graph, which has no blocks, as changes of the grad mode."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._before: torch.fx.Node | None = None

    def switch(self, quiet: bool) -> None:
        """Start a no_grad block before the next node if ``quiet`` is True, or end it."""
        if quiet and self._before is None:
            self._before = self._graph.call_function(torch.is_grad_enabled)
            self._graph.call_function(set_grad_mode, (False,))
        elif not quiet and self._before is not None:
            self._graph.call_function(set_grad_mode, (self._before,))
            self._before = None
