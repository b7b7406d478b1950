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
from tsfunc.dispatch.places import source_of
from tsfunc.errors import MeshError
from tsfunc.program.passes.effects import Aliases, communicates, is_pure

# The kinds of exchange after which all ranks have the same value. Their transposes add up the
# ranks' cotangents, so each rank may keep its own part of a cotangent until then.
_MAKES_EQUAL = frozenset({"sum", "gather", "enter"})
# The kinds of exchange after which each rank has a value of its own.
_MAKES_PARTS = frozenset({"slice", "scatter", "all_to_all", "permute"})


def share_equal_values(graph: torch.fx.Graph) -> None:
    """Replace collectives of values that are equal on all ranks by local operators.

    The sum of such a value is a multiple of it, and its gathered values are copies. If a promise
    of ``out_specs`` follows from the program, it is not checked when the program runs.

    Raises:
        MeshError: a promise of ``out_specs`` is made for a value that differs between ranks.
    """
    if not any(node.target is MAP for node in graph.nodes):
        return
    aliases = Aliases(graph)
    _refuse_broken_promises(graph, aliases)
    varying = _varying_axes(graph, aliases)
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


def _refuse_broken_promises(graph: torch.fx.Graph, aliases: Aliases) -> None:
    """Raise if a result is promised to be equal along an axis and is computed from parts.

    Values that the analysis can't follow are not refused: inputs of the program, writes, and
    choices and loops that exchange values.

    Raises:
        MeshError: there is such a result. The message has the line that computes it.
    """
    differing: dict[torch.fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        found = frozenset[str]().union(*(differing[each] for each in node.all_input_nodes))
        if node.op != "call_function" or aliases.is_written(node):
            found = frozenset()
        elif node.target is INDEX:
            found = frozenset({str(node.args[0])})
        elif isinstance(node.target, ControlFlow):
            found -= {
                str(each.args[3])
                for body in node.target.bodies
                for each in every_node(body.graph)
                if each.target is MAP
            }
        elif node.target is MAP:
            x, kind, _, axis, mesh = node.args
            checked = str(mesh).partition(";")[2] not in ("values", "unchecked")
            if kind == "leave" and axis in found and checked:
                _refuse_promise(x, str(axis))
            found = found - {axis} if kind in _MAKES_EQUAL else found
            found = found | {axis} if kind in _MAKES_PARTS else found
        differing[node] = found


def _refuse_promise(node: Any, axis: str) -> None:
    while node.meta.get("place") is None or (node.target is MAP and node.args[1] == "leave"):
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    place = node.meta.get("place")
    where = "" if place is None else f", at {place}{source_of(place, ': ')}"
    raise MeshError(
        f"shard_map: out_specs: expected a result that is equal on all ranks along {axis!r}, which "
        f"its spec does not name, got one that is computed from different values on each "
        f"rank{where}. Combine the values over the axis (psum, pmean, all_gather), name the axis "
        f"in the spec, or pass check='values' to compare the results when the program runs."
    )


def _varying_axes(graph: torch.fx.Graph, aliases: Aliases) -> dict[torch.fx.Node, frozenset[str]]:
    """Return the axes along which each value may differ among the ranks."""
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
        elif isinstance(node.target, ControlFlow):
            # Bodies without a part of a rank compute equal values from equal values.
            varying[node] = of_inputs | _axes_of_parts(node.target, every)
        elif communicates(node):
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


def _axes_of_parts(op: ControlFlow, every: frozenset[str]) -> frozenset[str]:
    """Return the axes along which bodies make values that differ between ranks."""
    found = frozenset[str]()
    for body in op.bodies:
        for node in body.graph.nodes:
            if node.target is INDEX:
                found |= {str(node.args[0])}
            elif node.target is MAP:
                if node.args[1] not in _MAKES_EQUAL:
                    found |= {str(node.args[3])}
            elif isinstance(node.target, ControlFlow):
                found |= _axes_of_parts(node.target, every)
            elif (
                node.op == "get_attr"
                or communicates(node)
                or (node.op == "call_function" and not is_pure(node))
            ):
                return every
    return found


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
