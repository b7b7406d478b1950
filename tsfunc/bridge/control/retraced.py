"""A call of control flow, traced again into control flow that torch's operators have.

torch's operators for control flow make one choice for all examples. They have no second
derivatives, and they can't have derivatives that the user defines. When a program is written in
these operators, a batch of calls is therefore traced once more, as ``vmap`` of the operator. So are
the derivatives of control flow (NOTE [derivatives in other control flow] in
``transforms/control/derived_operators``), and functions whose derivatives the user defines, which
are not nodes of such a trace. In it (``TraceLevel.for_torch``) no vmap is hidden: NOTE [unreadable
choices] in ``transforms/control/cond``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.bodies import NumberNodes
from tsfunc.bridge.control.control_flow import Body, NoTorchOperator
from tsfunc.bridge.control.traced_bodies import in_graph_order, inputs_first
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.trace.trace_level import TraceLevel, node_of_output, traced_as
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.registrations import watching_factories, watching_random
from tsfunc.bridge.tracers.torch_settings import outside_modes, traces_compile


def retrace(
    name: str,
    run: Callable[..., Sequence[torch.Tensor]],
    nodes: Sequence[Any],
    outside: Callable[[Any], Any],
) -> tuple[Body, list[torch.fx.Node], dict[str, torch.Tensor]]:
    """Trace a function of operands, with one choice for all examples of a vmap.

    Args:
        run: takes as many arguments as there are operands.
        nodes: the nodes of the operands, with their fake values, and numbers.
        outside: returns the node of a symbolic number among the operands or their sizes.

    Returns:
        The graph as a body of the tensors among the operands, the nodes of the numbers that it
        takes after all operands, and the constants that its ``get_attr`` nodes name.

    Raises:
        NoTorchOperator: the function can't be traced so.
    """
    values = [fake_value(node) for node in nodes]
    symbols = _symbols_of(values)
    tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    with torch_state.outside_all_transforms(), outside_modes():
        level = TraceLevel(name, symbols)
        level.for_torch = True
        numbers = level.number_nodes = NumberNodes(level, outside)
        symbols.record_in(level.graph, {})
        try:
            with (
                traces_compile(), level, watching_random(), watching_factories(),
                symbols.in_body(level.graph, numbers), torch.enable_grad(),
            ):  # fmt: skip
                for i in tensors:
                    values[i] = _input(level, f"x{i}", nodes[i], values[i])
                results = [node_of_output(x, level) for x in run(*values)]
        except Exception as error:
            raise NoTorchOperator(f"{name}: {error}") from error
        finally:
            symbols.end()
    level.graph.output(tuple(results))
    inputs_first(level.graph)
    after = range(len(nodes), len(nodes) + len(numbers.nodes))
    constants = {str(tracer.node.target): value for value, tracer in level.lifted.values()}
    inputs = in_graph_order(level.graph, tensors, after)
    return Body(name, level.graph, inputs), numbers.nodes, constants


def fake_value(node: Any) -> Any:
    """Return the fake value of a node, or its symbolic number; a number is returned unchanged.

    Raises:
        NoTorchOperator: neither is known.
    """
    if not isinstance(node, torch.fx.Node):
        return node
    if "val" not in node.meta and "number" not in node.meta:
        raise NoTorchOperator(f"%{node.name}, of which nothing is known")
    return node.meta.get("val", node.meta.get("number"))


def _symbols_of(values: Sequence[Any]) -> Symbols:
    """Return the symbols of the trace that made fake values; new ones if their sizes are fixed."""
    fake: Any = next((mode for x in values if (mode := getattr(x, "fake_mode", None))), None)
    symbols: Symbols | None = getattr(getattr(fake, "shape_env", None), "symbols", None)
    if symbols is None:
        symbols = Symbols({})
        symbols.fake = fake or symbols.fake
    return symbols


def _input(level: TraceLevel, name: str, node: torch.fx.Node, value: torch.Tensor) -> torch.Tensor:
    if getattr(value, "fake_mode", None) is not level.fake:
        value = level.fake_like(value, value.shape, value.stride())
    tracks = bool(node.meta.get("requires_grad"))
    return traced_as(value, level.graph.placeholder(name), level, tracks)
