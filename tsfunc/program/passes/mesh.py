"""Mesh axes in a program: collectives of equal values, and the mark of the program.

NOTE [marks of programs]
Ranks that run different programs would exchange unrelated values. Each exchange of a program
therefore carries its mark, a hash of its operators and sizes, after the names of the axes
(``"dp=4;program:1f0a..."``). Before the first exchange of a program along an axis, the ranks agree
on the mark (NOTE [agreements] in ``bridge/mesh/agreement``). The mark does not depend on the rank,
and a file keeps it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.mesh.mesh_operators import MAP
from tsfunc.bridge.mesh.meshes import sizes_of, split_check
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.errors import MeshError
from tsfunc.program.passes.effects import every_node
from tsfunc.program.passes.equal_values import MayVary, ShardedAlong
from tsfunc.user_code import source_line


def share_equal_values(graph: torch.fx.Graph) -> None:
    """Replace collectives of values that are equal on all ranks by local operators.

    The sum of such a value is a multiple of it, and its gathered values are copies. If a guarantee
    of ``out_specs`` follows from the program, it is not checked when the program runs.

    Raises:
        MeshError: a guarantee of ``out_specs`` is made for a value that differs between ranks.
    """
    exchanges: list[Any] = [node for node in every_node(graph) if node.target is MAP]
    if not exchanges:
        return
    from_parts = ShardedAlong(graph).axes
    for node in exchanges:
        x, kind, _, axis, mesh = node.args
        checked = split_check(mesh)[1] not in ("values", "unchecked")
        if kind == "leave" and checked and axis in from_parts.get(x, ()):
            _refuse_guarantee(x, axis)
    varying = MayVary(graph).axes
    at_top = set(graph.nodes)
    for node in exchanges:
        x, kind, ints, axis, mesh = node.args
        if axis in varying.get(x, (axis,)):
            continue
        if kind == "leave" and mesh.endswith(";values"):
            node.args = (x, kind, ints, axis, f"{split_check(mesh)[0]};unchecked")
        elif kind in ("sum", "gather") and node in at_top:
            # A body also runs in pullbacks, whose cotangents must not be each rank's own parts.
            for new_node in _make_local(graph, node):
                varying[new_node] = varying[x]


def _refuse_guarantee(node: Any, axis: str) -> None:
    while node.meta.get("location") is None or (node.target is MAP and node.args[1] == "leave"):
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    location = node.meta.get("location")
    where = "" if location is None else f", at {location}{source_line(location, ': ')}"
    raise MeshError(
        f"shard_map: out_specs: expected a result that is equal on all ranks along {axis!r}, which "
        f"its spec does not name, got one that is computed from different values on each "
        f"rank{where}. Combine the values over the axis (psum, pmean, all_gather), name the axis "
        f"in the spec, or pass check='values' to compare the results when the program runs."
    )


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
    new_nodes = []
    with graph.inserting_before(node):
        for target, args in steps:
            if target is torch.ops.aten.contiguous.default and value.is_contiguous():
                continue
            value = target(value, *args)
            at = graph.call_function(target, (at, *args))
            at.meta = {**node.meta, "op": operator_of(target), "val": value}
            new_nodes.append(at)
    at.meta["val"] = after
    node.replace_all_uses_with(at)
    graph.erase_node(node)
    return new_nodes


def mark_exchanges(graph: torch.fx.Graph) -> None:
    """Write the program's mark into each of its exchanges: NOTE [marks of programs]."""
    exchanges = [node for node in every_node(graph) if node.target is MAP]
    unmarked = []
    for node in exchanges:
        *rest, mesh = node.args
        text, check = split_check(str(mesh))
        if not check or check.startswith("program:"):
            node.args = (*rest, text)
            unmarked.append(node)
    if not unmarked:
        return
    digest = hashlib.blake2b(digest_size=8)
    for node in every_node(graph):
        line = f"{node.op} {node.name} {_name_of(node.target)} {node.args} {node.kwargs}"
        digest.update(f"{line} {_agreed_type(node.meta.get('val'))}\n".encode())
    for node in unmarked:
        *rest, axes = node.args
        node.args = (*rest, f"{axes};program:{digest.hexdigest()}")


def _agreed_type(value: Any) -> str:
    """Return the dtype and the sizes of a tensor, equal in every process."""
    if not isinstance(value, torch.Tensor):
        return ""
    sizes = ",".join(str(size) if isinstance(size, int) else "named" for size in value.shape)
    return f"{value.dtype}[{sizes}]"


def _name_of(target: Any) -> str:
    """Return the name of a node's target, equal in every process."""
    if isinstance(target, ControlFlow):
        return target.name
    return str(getattr(target, "__qualname__", target))
