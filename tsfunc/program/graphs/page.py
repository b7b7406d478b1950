"""A program or a report as one HTML page, which needs no other file and no network.

The page has a graph that can be moved (drag), scaled (wheel) and reset (double click), a search
field, and for each node a hint with its code, type, line of the user's code and measured time. The
bodies of control flow are folded; a click on the node of the control flow opens them. ``page.js``
and ``page.css`` are written into the page.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.program.graphs.codegen import line_of, scope_of, statements
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.graphs.properties import draw, properties_of

Facts = dict[str, dict[str, dict[str, Any]]]


def document(title: str, body: str, facts: Facts) -> str:
    """Return an HTML page.

    Args:
        facts: the hints of each graph's nodes.
    """
    module_file = Path(__file__)
    style = module_file.with_name("page.css").read_text(encoding="utf-8")
    script = module_file.with_name("page.js").read_text(encoding="utf-8")
    data = json.dumps(facts).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><span id="count"></span>'
        f'<input id="search" type="search" placeholder="Search" aria-label="Search"></header>'
        f'<main>{body}</main><div id="hint"></div>'
        f'<script type="application/json" id="facts">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


_SLOW_STYLE = ' style="color: #b00020; font-weight: bold"'


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    slow: Sequence[bool] = (),
    caption: str = "",
) -> str:
    """Return rows of plain text as an HTML table, whose columns a page sorts by a click.

    Args:
        slow: True for each row that is to be seen at once.
    """
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    marks = itertools.chain(slow, itertools.repeat(False))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr{_SLOW_STYLE if mark else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row, mark in zip(rows, marks, strict=False)
    )
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def program_page(program: ProgramData, times: Mapping[str, float] | None = None) -> str:
    """Return the page of a program.

    Args:
        times: the measured seconds of its nodes, by name.
    """
    return programs_page(program.name, [program], {program: times or {}})


def programs_page(
    title: str, programs: Sequence[ProgramData], times: Mapping[Any, Mapping[str, float]]
) -> str:
    """Return the page of several programs of one function."""
    facts: Facts = {}
    numbers = itertools.count()
    body = ""
    for i, program in enumerate(programs):
        seconds = times.get(program, {})
        head = f"Program {i + 1} of {len(programs)}: " if len(programs) > 1 else ""
        descriptors = [[name, repr(descriptor)] for name, descriptor in program.descriptors.items()]
        body += (
            f"<section><h2>{escape(head + program.name)}</h2>"
            + "".join(_graph(program.name, program.graph, program, seconds, facts, numbers))
            + f"<details open><summary>Arguments</summary>{table(['name', 'type'], descriptors)}"
            + f"</details><details><summary>Guards ({len(program.guards.texts)})</summary>"
            + f"<pre>{escape(str(program.guards))}</pre></details></section>"
        )
    return document(title, body, facts)


def _graph(
    name: str, graph: torch.fx.Graph, program: ProgramData | None, times: Mapping[str, float],
    facts: Facts, numbers: Iterator[int], inputs: Sequence[int] = (),
) -> Iterator[str]:  # fmt: skip
    """Yield a graph with its code, and the bodies in it."""
    identifier = f"graph-{next(numbers)}"
    lifted = {} if program is None else program.lifted
    updates = () if program is None else program.updates
    inputs = inputs if program is None else program.inputs
    properties = properties_of(graph)
    total = sum(times.values())
    nodes: dict[str, dict[str, Any]] = {}
    lines = []
    last = ""
    for text, node in statements(graph, inputs, scope_of(name, graph, lifted), updates):
        if node is None:
            lines.append(escape(text))
            continue
        location = node.meta.get("location")
        if location is not None and line_of(location) != last:
            last = line_of(location)
            lines.append(escape(f"# {last}"))
        kind = str(properties[node.name]) if node.name in properties else ""
        lines.append(
            f'<span data-line="{escape(node.name)}">{escape(text.rstrip())}'
            f"{escape('  # ' + kind) if kind else ''}</span>"
        )
        entry: dict[str, Any] = {"code": text.strip()}
        if kind:
            entry["type"] = kind
        if location is not None:
            entry["line"] = line_of(location)
        if node.name in times:
            share = f" ({times[node.name] / total:.0%})" if total else ""
            entry["time"] = f"{times[node.name] * 1e6:.1f} us{share}"
        nodes[node.name] = entry
    for node in graph.nodes:
        if node.op == "get_attr":
            nodes[node.name] = {"read at every call": node.name, "type": str(properties[node.name])}
    bodies = ""
    for node in graph.nodes:
        if isinstance(node.target, ControlFlow):
            ids = []
            for body in node.target.bodies:
                ids.append(f"body-{next(numbers)}")
                inner = _graph(body.name, body.graph, None, {}, facts, numbers, body.inputs)
                bodies += (
                    f'<details id="{ids[-1]}" class="body"><summary>{escape(body.name)} of '
                    f"{escape(node.name)}</summary>{''.join(inner)}</details>"
                )
            if ids:
                nodes.setdefault(node.name, {})["bodies"] = ids
    facts[identifier] = nodes
    yield f'<div class="graph" data-graph="{identifier}">{draw(name, graph, properties)}</div>'
    yield f"<details open><summary>Code of {escape(name)}</summary><pre>"
    yield "\n".join(lines)
    yield f"</pre></details>{bodies}"
