"""Constant folding: values that depend on no input are computed once, when the program is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.dispatch import state
from tsfunc.program.passes.aliases import Aliases
from tsfunc.program.passes.effects import communicates, is_pure

MOST_ELEMENTS = 1 << 16  # limit for a constant that a program keeps

# The elements of their results are undefined.
_UNDEFINED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip


def fold_constants(
    graph: torch.fx.Graph, frozen: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute the nodes that depend on constants alone, and make them constants of the program.

    A node is not folded if the caller gets its result, if it is written to, or if its result is
    large and larger than its arguments, since a program should not store large tensors.

    Args:
        graph: the graph, which is changed.
        frozen: tensors that never change, by the names of their ``get_attr`` nodes.

    Returns:
        The new constants, by the names of their ``get_attr`` nodes.
    """
    if torch_state.in_dispatch_modes():
        return {}  # a mode would see the operators, and may change their results
    aliases = Aliases(graph)
    values = {node: frozen[str(node.target)] for node in graph.nodes
              if node.op == "get_attr" and str(node.target) in frozen}  # fmt: skip
    folded: list[torch.fx.Node] = []
    with torch_state.outside_all_levels(), state.outside_all_levels(), torch.no_grad():
        for node in graph.nodes:
            if _foldable(node, aliases, values):
                result = _computed(node, values)
                if result is not None:
                    values[node] = result
                    folded.append(node)
    return {
        str(made.target): values[node]
        for i, node in enumerate(folded)
        if any(user not in values for user in node.users)
        for made in [_as_constant(graph, node, f"constant_{i}")]
    }


def is_computable(node: torch.fx.Node) -> bool:
    """Return True if a node is a pure function of its arguments with a defined tensor result."""
    op = node.meta.get("op")
    return (
        isinstance(op, TorchOperator)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and is_pure(node)
        and op.overload.overloadpacket.__name__ not in _UNDEFINED
    )


def _foldable(node: torch.fx.Node, aliases: Aliases, values: Mapping[Any, Any]) -> bool:
    value = node.meta.get("val")
    return (
        is_computable(node)
        and not communicates(node)
        and all(arg in values for arg in node.all_input_nodes)
        and isinstance(value, torch.Tensor)
        and all(isinstance(size, int) for size in value.shape)
        and 0 < value.numel() <= max(MOST_ELEMENTS, *_sizes_of(node, values))
        and not aliases.escapes(node)
        and not aliases.is_written(node)
    )


def _sizes_of(node: torch.fx.Node, values: Mapping[Any, torch.Tensor]) -> list[int]:
    """Return the sizes of a node's arguments."""
    return [0, *(values[arg].numel() for arg in node.all_input_nodes)]


def _computed(node: torch.fx.Node, values: Mapping[torch.fx.Node, torch.Tensor]) -> Any:
    """Return the result; None if it differs in type or layout from the result in the trace."""
    args = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
    result = node.meta["op"].overload(*args, **kwargs)
    expected = node.meta["val"]
    alike = isinstance(result, torch.Tensor) and (
        (result.dtype, result.device, result.shape, result.stride())
        == (expected.dtype, expected.device, expected.shape, expected.stride())
    )
    return result if alike else None


def _as_constant(graph: torch.fx.Graph, node: torch.fx.Node, name: str) -> torch.fx.Node:
    with graph.inserting_before(node):
        made = graph.create_node("get_attr", name, name=name)
    made.target = made.name  # differs from `name` if a parameter has that name
    made.meta = {
        key: node.meta[key] for key in ("val", "requires_grad", "place") if key in node.meta
    }
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made
