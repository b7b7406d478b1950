"""Mesh axes in a program: collectives of equal values, and the mark of the program.

NOTE [marks of programs]
Ranks that run different programs would exchange unrelated values. Each exchange of a program
therefore carries its mark, a hash of its operators, after the names of the axes
(``"dp=4;program:1f0a..."``). Before the first exchange of a program along an axis, the ranks agree
on the mark (NOTE [agreements] in ``bridge/mesh/agreement``). The mark does not depend on the rank,
and a file keeps it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow, every_node
from tsfunc.bridge.mesh.meshes import sizes_of
from tsfunc.bridge.mesh.operators import INDEX, MAP
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.program.passes.effects import Aliases, communicates, is_pure

# The kinds of exchange after which all ranks have the same value. Their transposes add up the
# ranks' cotangents, so each rank may keep its own part of a cotangent until then.
_MAKES_EQUAL = frozenset({"sum", "gather", "enter"})


def share_equal_values(graph: torch.fx.Graph) -> None:
    """Replace collectives of values that are equal on all ranks by local operators.

    The sum of such a value is a multiple of it, and its gathered values are copies. If a promise
    of ``out_specs`` follows from the program, it is not checked when the program runs.
    """
    if not any(node.target is MAP for node in graph.nodes):
        return
    varying = _varying_axes(graph)
    for node in list(graph.nodes):
        if node.target is not MAP:
            continue
        x, kind, ints, axis, mesh = node.args
        if axis in varying[x]:
            continue
        if kind == "leave" and str(mesh).endswith(";values"):
            node.args = (x, kind, ints, axis, f"{mesh.partition(';')[0]};unchecked")
        elif kind in ("sum", "gather"):
            for made in _make_local(graph, node):
                varying[made] = varying[x]


def _varying_axes(graph: torch.fx.Graph) -> dict[torch.fx.Node, frozenset[str]]:
    """Return the axes along which each value may differ among the ranks."""
    aliases = Aliases(graph)
    every = frozenset(
        axis
        for node in graph.nodes
        if node.target is MAP
        for axis in sizes_of(str(node.args[4]))
    )  # fmt: skip
    varying: dict[torch.fx.Node, frozenset[str]] = {}
    constant: set[torch.fx.Node] = set()  # values that no derivative reaches
    for node in graph.nodes:
        of_inputs = frozenset[str]().union(*(varying[each] for each in node.all_input_nodes))
        if node.op != "call_function" or aliases.is_written(node) or not is_pure(node):
            varying[node] = every
        elif node.target is MAP:
            axis = frozenset({str(node.args[3])})
            equal = node.args[1] in _MAKES_EQUAL or (
                node.args[1] == "share" and node.args[0] in constant
            )
            varying[node] = of_inputs - axis if equal else of_inputs | axis
        elif node.target is INDEX:
            varying[node] = frozenset({str(node.args[0])})
        elif _reaches_other_ranks(node):
            varying[node] = every
        else:
            varying[node] = of_inputs
        if (
            node.op == "call_function"
            and not varying[node]
            and constant.issuperset(node.all_input_nodes)
        ):
            constant.add(node)
    return varying


def _reaches_other_ranks(node: torch.fx.Node) -> bool:
    """Return True if the node, or a body of it, exchanges values or reads the rank's index."""
    if isinstance(node.target, ControlFlow):
        return any(
            _reaches_other_ranks(inner) or (inner.op == "call_function" and not is_pure(inner))
            for body in node.target.bodies
            for inner in body.graph.nodes
        )
    return communicates(node)


def _make_local(graph: torch.fx.Graph, node: torch.fx.Node) -> list[torch.fx.Node]:
    """Replace the sum or the gathered values of a value that is equal on all ranks.

    Returns:
        The nodes that were made.
    """
    x, kind, ints, axis, mesh = node.args
    size = sizes_of(str(mesh))[str(axis)]
    assert isinstance(x, torch.fx.Node)
    before, after = x.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return []
    if kind == "sum":
        if before.dtype != after.dtype:
            return []
        steps: list[tuple[Any, Any]] = [(torch.ops.aten.mul.Tensor, (size,))]
    else:
        assert isinstance(ints, list | tuple)
        shape = [-1] * (before.dim() + 1)
        shape[int(ints[0])] = size  # type: ignore[arg-type]
        steps = [(torch.ops.aten.unsqueeze.default, (ints[0],)),
                 (torch.ops.aten.expand.default, (shape,))]  # fmt: skip
    steps.append((torch.ops.aten.contiguous.default, ()))
    value, at = before, x
    made = []
    with graph.inserting_before(node):
        for target, args in steps:
            if target is torch.ops.aten.contiguous.default and value.is_contiguous():
                continue
            value = target(value, *args)
            at = graph.call_function(target, (at, *args))
            at.meta = {**node.meta, "op": operator_of(target), "val": value}
            made.append(at)
    at.meta["val"] = after
    node.replace_all_uses_with(at)
    graph.erase_node(node)
    return made


def mark_exchanges(graph: torch.fx.Graph) -> None:
    """Write the program's mark into each of its exchanges: NOTE [marks of programs]."""
    exchanges = [node for node in every_node(graph) if node.target is MAP]
    unmarked = []
    for node in exchanges:
        *rest, mesh = node.args
        text, _, check = str(mesh).partition(";")
        if not check or check.startswith("program:"):
            node.args = (*rest, text)
            unmarked.append(node)
    if not unmarked:
        return
    digest = hashlib.blake2b(digest_size=8)
    for node in every_node(graph):
        line = f"{node.op} {node.name} {_name_of(node.target)} {node.args} {node.kwargs}\n"
        digest.update(line.encode())
    for node in unmarked:
        *rest, axes = node.args
        node.args = (*rest, f"{axes};program:{digest.hexdigest()}")


def _name_of(target: Any) -> str:
    """Return the name of a node's target, equal in every process."""
    if isinstance(target, ControlFlow):
        return target.name
    return str(getattr(target, "__qualname__", target))
