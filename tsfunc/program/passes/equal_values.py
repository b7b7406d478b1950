"""The mesh axes along which the values of a program differ between ranks.

A value has a set of axes. The result of an operator has the axes of its arguments; an exchange adds
its axis or removes it. Choices and loops know how the axes of their results follow from those of
their operands (``ControlFlow.result_axes``), so the analyses see through their bodies. There are
two, since values from outside of a program may vary or be equal: :class:`MayVary` finds all axes
along which a value may vary, and :class:`ShardedAlong` those along which it is computed from the
ranks' own parts.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx

from tsfunc.bridge.control.control_flow import Axes, Body, ControlFlow
from tsfunc.bridge.mesh.exchanges import EXCHANGES
from tsfunc.bridge.mesh.mesh_operators import INDEX, MAP, transpose_call
from tsfunc.bridge.mesh.meshes import sizes_of
from tsfunc.program.passes.effects import Aliases, communicates, every_node, is_pure

_NONE: Axes = frozenset()
# The kinds of exchange after which all ranks have the same value. Their transposes add up the
# ranks' cotangents, so each rank may keep its own part of a cotangent until then.
MAKES_EQUAL = frozenset(kind for kind, exchange in EXCHANGES.items() if exchange.makes == "equal")
# The kinds that give equal values to equal values, in a pullback too if the transpose is one.
_IN_PULLBACKS = MAKES_EQUAL | {"total"}
# The kinds of exchange after which each rank has a value of its own.
_MAKES_PARTS = frozenset(kind for kind, exchange in EXCHANGES.items() if exchange.makes == "parts")


class _Visit:
    """The state of one pass over a graph.

    Attributes:
        axes: the axes of each node.
        results: for calls of control flow, the axes of each result.
        constant: the nodes that are computed from no inputs, and that no derivative reaches.
    """

    def __init__(self) -> None:
        self.axes: dict[torch.fx.Node, Axes] = {}
        self.results: dict[Any, Sequence[Axes]] = {}
        self.constant: set[torch.fx.Node] = set()

    def of_inputs(self, node: torch.fx.Node) -> Axes:
        """Return the axes of all arguments of a node."""
        return _NONE.union(*(self.axes[argument] for argument in node.all_input_nodes))


class Flow:
    """An analysis of a graph and of the bodies in it.

    Attributes:
        axes: the axes of each node that the analysis has reached. A body that is run in several
            ways has the axes of all of them.
    """

    def __init__(self, graph: torch.fx.Graph, unknown: Axes) -> None:
        self._unknown = unknown  # the axes of a value about which nothing is known
        self._aliases: dict[torch.fx.Graph, Aliases] = {}
        self.axes: dict[torch.fx.Node, Axes] = {}
        self._visit(graph, None)

    def of_call(self, node: torch.fx.Node, visit: _Visit) -> Axes:
        """Return the axes of the result of an operator."""
        raise NotImplementedError

    def of_unseen(self, op: ControlFlow, of_inputs: Axes) -> Axes:
        """Return the axes of the results of control flow whose ``flow`` is not known."""
        raise NotImplementedError

    def _visit(self, graph: torch.fx.Graph, inputs: Sequence[Axes] | None) -> _Visit:
        """Find the axes of each node.

        Args:
            inputs: the axes of its placeholders; None if nothing is known about them.
        """
        aliases = self._aliases.get(graph)
        if aliases is None:
            aliases = self._aliases[graph] = Aliases(graph)
        visit, axes_of_inputs = _Visit(), iter(inputs or ())
        for node in graph.nodes:
            if node.op == "output":
                break
            axes = (
                next(axes_of_inputs, self._unknown) if node.op == "placeholder" else self._unknown
            )
            if aliases.is_written(node):
                axes = self._unknown
            elif node.op == "call_function":
                axes = self._of_node(node, visit)
            visit.axes[node] = axes
            if (
                node.op == "call_function"
                and not axes
                and visit.constant.issuperset(node.all_input_nodes)
            ):
                visit.constant.add(node)
            self.axes[node] = self.axes.get(node, _NONE) | axes
        return visit

    def _of_node(self, node: torch.fx.Node, visit: _Visit) -> Axes:
        if isinstance(node.target, ControlFlow):
            args: tuple[Any, ...] = node.args
            operands = [visit.axes.get(arg, _NONE) for arg in args]
            results = node.target.result_axes(operands, self._through)
            if results is None:
                return self.of_unseen(node.target, visit.of_inputs(node))
            visit.results[node] = results
            return _NONE.union(*results)
        if node.target is operator.getitem and node.args[0] in visit.results:
            return visit.results[node.args[0]][node.args[1]]  # type: ignore[index]
        return self.of_call(node, visit)

    def _through(self, body: Body, operands: Sequence[Axes]) -> list[Axes]:
        """Return the axes of a body's results."""
        visit = self._visit(body.graph, [operands[at] for at in body.inputs])
        results: Any = next(iter(reversed(body.graph.nodes))).args[0]
        return [visit.axes.get(result, _NONE) for result in results]


class MayVary(Flow):
    """The axes along which a value may vary; an upper bound."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        every = frozenset(
            axis
            for node in every_node(graph)
            if node.target is MAP
            for axis in sizes_of(str(node.args[4]))
        )  # fmt: skip
        super().__init__(graph, every)

    def of_call(self, node: torch.fx.Node, visit: _Visit) -> Axes:
        if node.target is INDEX:
            return frozenset({str(node.args[0])})
        if not is_pure(node) or (communicates(node) and node.target is not MAP):
            return self._unknown
        of_inputs = visit.of_inputs(node)
        if node.target is MAP:
            x, kind, _, axis, _ = node.args
            # No derivative of a share may depend on which ranks have a part of a cotangent.
            equal = kind in MAKES_EQUAL or (kind == "share" and x in visit.constant)
            return of_inputs - {str(axis)} if equal else of_inputs | {str(axis)}
        return of_inputs

    def of_unseen(self, op: ControlFlow, of_inputs: Axes) -> Axes:
        # Bodies without a part of a rank compute equal values from equal values.
        return self._unknown if op.opaque else of_inputs | self._parts(op)

    def _parts(self, op: ControlFlow) -> Axes:
        """Return the axes along which bodies, or their transposes, make values that differ."""
        axes = _NONE
        for body in op.bodies:
            for node in every_node(body.graph):
                if node.target is INDEX:
                    axes |= {str(node.args[0])}
                elif node.target is MAP:
                    kind = str(node.args[1])
                    if not _IN_PULLBACKS.issuperset({kind, transpose_call(kind, ())[0]}):
                        axes |= {str(node.args[3])}
                elif (
                    node.op == "get_attr"
                    or communicates(node)
                    or (node.op == "call_function" and not is_pure(node))
                ):
                    return self._unknown
        return axes


class ShardedAlong(Flow):
    """The axes along which a value is computed from different values on each rank; a lower bound.

    Values that the analysis can't follow have no axes: inputs of the program, and writes.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__(graph, _NONE)

    def of_call(self, node: torch.fx.Node, visit: _Visit) -> Axes:
        if node.target is INDEX:
            return frozenset({str(node.args[0])})
        of_inputs = visit.of_inputs(node)
        if node.target is MAP:
            axis = frozenset({str(node.args[3])})
            equal = node.args[1] in MAKES_EQUAL or node.args[1] == "total"
            of_inputs = of_inputs - axis if equal else of_inputs
            return of_inputs | axis if node.args[1] in _MAKES_PARTS else of_inputs
        return of_inputs

    def of_unseen(self, op: ControlFlow, of_inputs: Axes) -> Axes:
        if op.opaque:
            return _NONE
        exchanged = {
            str(node.args[3])
            for body in op.bodies
            for node in every_node(body.graph)
            if node.target is MAP
        }
        return of_inputs - exchanged
