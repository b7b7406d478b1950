"""Drawing of a program: an SVG picture of its graph, with a row per distance from the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.program.graphs.properties import ProgramProperties

_CHARACTER = 6.6  # the width of a character, in pixels
_HEIGHT, _ROW, _GAP, _MARGIN = 38, 74, 18, 20
_COLOURS = {"placeholder": "#dbeafe", "get_attr": "#fef3c7", "output": "#dcfce7"}
_STYLE = (
    "text{font:11px monospace;text-anchor:middle;fill:#111}"
    "text.type{fill:#666;font-size:10px}"
    "rect{stroke:#888}path{fill:none;stroke:#aaa}"
)


@dataclass(frozen=True)
class _Box:
    """A node in the picture: the middle of its upper edge, its size and its texts."""

    x: float
    y: float
    width: float
    title: str
    type: str
    colour: str
    hint: str
    name: str


def draw(name: str, graph: torch.fx.Graph, known: ProgramProperties) -> str:
    """Return a graph as SVG text.

    A value is in the row below its lowest argument, near the middle of its arguments. A tooltip
    shows the user's line.

    Args:
        name: the title.
        graph: the graph; unused values are left out.
        known: the properties of its values.
    """
    nodes = [node for node in graph.nodes if node.users or node.op == "output"]
    rows = _rows(nodes)
    widths = {node: _width(node, known) for node in nodes}
    middles = _middles(rows, widths)
    left = min(middles[node] - widths[node] / 2 for node in nodes)
    boxes = {
        node: _Box(
            middles[node] - left + _MARGIN,
            _MARGIN + i * _ROW,
            widths[node],
            _title(node),
            _type(node, known),
            _COLOURS.get(node.op, "#fff"),
            str(node.meta.get("place") or node.name),
            node.name,
        )
        for i, row in enumerate(rows)
        for node in row
    }
    width = max(box.x + box.width / 2 for box in boxes.values()) + _MARGIN
    height = 2 * _MARGIN + (len(rows) - 1) * _ROW + _HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}">',
        f"<title>{escape(name)}</title><style>{_STYLE}</style>",
        *(_arrow(boxes[arg], boxes[node]) for node in nodes for arg in node.all_input_nodes),
        *(_drawn(box) for box in boxes.values()),
        "</svg>",
    ]
    return "\n".join(lines)


def _rows(nodes: Sequence[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """Return the nodes by their distance from the inputs; lifted tensors are near their uses."""
    depth: dict[torch.fx.Node, int] = {}
    for node in nodes:
        depth[node] = 1 + max((depth[arg] for arg in node.all_input_nodes), default=-1)
    for node in nodes:
        if node.op == "get_attr":
            depth[node] = max(0, min(depth[user] for user in node.users) - 1)
    rows: list[list[torch.fx.Node]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in nodes:
        rows[depth[node]].append(node)
    return rows


def _middles(
    rows: Sequence[Sequence[torch.fx.Node]], widths: dict[torch.fx.Node, float]
) -> dict[torch.fx.Node, float]:
    """Return the middle of each node in its row, as close to its arguments as the others allow."""
    middles: dict[torch.fx.Node, float] = {}
    for row in rows:
        wanted = {}
        for node in row:
            above = [middles[arg] for arg in node.all_input_nodes if arg in middles]
            wanted[node] = sum(above) / len(above) if above else 0.0
        edge = float("-inf")
        for node in sorted(row, key=wanted.__getitem__):
            middles[node] = max(wanted[node], edge + widths[node] / 2)
            edge = middles[node] + widths[node] / 2 + _GAP
        if row:  # the shift to the right is averaged over the row
            shift = sum(middles[node] - wanted[node] for node in row) / len(row)
            for node in row:
                middles[node] -= shift
    return middles


def _title(node: torch.fx.Node) -> str:
    if node.op == "output":
        return "return"
    if node.op in ("placeholder", "get_attr"):
        return node.name
    if isinstance(node.target, ControlFlow):
        return node.target.name
    words = [_argument(arg) for arg in node.args]
    words += [f"{name}={_argument(arg)}" for name, arg in node.kwargs.items()]
    rest = ", ".join(words)
    called = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return f"{called}({rest if len(rest) <= _LONGEST else rest[:_LONGEST] + '...'})"


_LONGEST = 24  # maximum number of characters of a call's arguments


def _argument(value: object) -> str:
    if isinstance(value, list | tuple) and any(isinstance(v, torch.fx.Node) for v in value):
        return f"[{', '.join(_argument(each) for each in value)}]"
    return "·" if isinstance(value, torch.fx.Node) else str(value).removeprefix("torch.")


def _type(node: torch.fx.Node, known: ProgramProperties) -> str:
    return str(known[node.name]) if node.name in known else ""


def _width(node: torch.fx.Node, known: ProgramProperties) -> float:
    return max(len(_title(node)), len(_type(node, known)), 6) * _CHARACTER + 12


def _arrow(start: _Box, end: _Box) -> str:
    y, below = start.y + _HEIGHT, end.y
    half = (y + below) / 2
    return (
        f'<path d="M{start.x:.0f} {y:.0f}C{start.x:.0f} {half:.0f} {end.x:.0f} {half:.0f} '
        f'{end.x:.0f} {below:.0f}"/>'
    )


def _drawn(box: _Box) -> str:
    return "".join(_parts(box))


def _parts(box: _Box) -> Iterator[str]:
    yield f'<g data-node="{escape(box.name)}"><title>{escape(box.hint)}</title>'
    yield (
        f'<rect x="{box.x - box.width / 2:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" '
        f'height="{_HEIGHT}" rx="5" fill="{box.colour}"/>'
    )
    middle = box.y + (_HEIGHT / 2 + 4 if not box.type else 16)
    yield f'<text x="{box.x:.0f}" y="{middle:.0f}">{escape(box.title)}</text>'
    if box.type:
        yield f'<text class="type" x="{box.x:.0f}" y="{box.y + 30:.0f}">{escape(box.type)}</text>'
    yield "</g>"
