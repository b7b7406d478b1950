"""A program as text: its Python, with the type of each value and the user's own lines."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.dispatch.places import Place
from tsfunc.program.closure.updates import Update
from tsfunc.program.graphs.codegen import function_name, names_of, statements
from tsfunc.program.graphs.properties import properties_of


def printed(
    name: str,
    graph: torch.fx.Graph,
    inputs: Sequence[int],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update] = (),
) -> str:
    """Return the source of a graph, with comments.

    The type of each value is at the end of its line. Each of the user's lines precedes its values.
    The bodies of control flow come first, as functions of their own.
    """
    bodies = [
        printed(body.name, body.graph, body.inputs, {}) + "\n"
        for node in graph.nodes
        if isinstance(node.target, ControlFlow)
        for body in node.target.bodies
    ]
    lines = [f"def {function_name(name)}(args):"]
    lines += [f"    {line}" for line in _lines(name, graph, inputs, lifted, updates)]
    return "".join(bodies) + "".join(f"{line}\n" for line in lines)


def _lines(
    name: str,
    graph: torch.fx.Graph,
    inputs: Sequence[int],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update] = (),
) -> Iterator[str]:
    known = properties_of(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            yield f"# {node.target}: {known[node.name]}"
    last = ""
    for statement in statements(graph, inputs, names_of(name, graph, lifted), updates):
        node = statement.node
        place = node.meta.get("place") if node is not None else None
        if place is not None and line_of(place) != last:
            last = line_of(place)
            indent = statement.text[: len(statement.text) - len(statement.text.lstrip())]
            yield f"{indent}# {last}"
        comment = f"  # {known[node.name]}" if node is not None and node.name in known else ""
        yield statement.text + comment


def line_of(place: Place | str) -> str:
    """Return one of the user's lines: the file, the number and the text, if it is available.

    A program that was loaded from a file has the text itself.
    """
    if isinstance(place, str):
        return place
    text = linecache.getline(place.file, place.line).strip()
    return f"{Path(place.file).name}:{place.line}" + (f"  {text}" if text else "")
