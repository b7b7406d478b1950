"""The properties of each value of a program, and its picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.mesh.exchanges import EXCHANGES
from tsfunc.bridge.mesh.mesh_operators import MAP
from tsfunc.types.values import plain_name

# --- properties of a program's values that are known before it runs


Number = int | float | bool


@dataclass(frozen=True)
class Properties:
    """The known properties of one value of a program.

    Attributes:
        dtype: the dtype of a tensor; the Python type of a number.
        shape: the sizes of a tensor: for each dim a number, or an expression of named dims.
        device: the device of a tensor.
        layout: the layout of a tensor.
        requires_grad: True if autograd records the value in a call of the program itself.
        constant: the value, if it is computed from constants alone.
        expression: the expression of a number in the named dims.
    """

    dtype: torch.dtype | type[Number]
    shape: tuple[int | str, ...] = ()
    device: torch.device | None = None
    layout: torch.layout | None = None
    requires_grad: bool = False
    constant: torch.Tensor | Number | None = None
    expression: str | None = None

    def __str__(self) -> str:
        if isinstance(self.dtype, type):
            return self.expression or self.dtype.__name__
        words = [f"{_plain(self.dtype)}[{', '.join(map(str, self.shape))}]", str(self.device)]
        if self.layout is not torch.strided:
            words.append(_plain(self.layout))
        if self.requires_grad:
            words.append("requires_grad")
        if self.constant is not None:
            words.append("constant")
        return " ".join(words)


class ProgramProperties(Mapping[str, Properties]):
    """Name to :class:`Properties`, in the program's order; ``print`` shows a table.

    Attributes:
        collectives: the number of calls of each collective along each mesh axis in a run of the
            program. A function with a derivative of its own (``custom_vjp``) runs as Python code,
            and its collectives are not among them; ``explain`` counts these too.
    """

    def __init__(
        self, values: Mapping[str, Properties], collectives: tuple[CollectiveUse, ...] = ()
    ) -> None:
        self._values = values
        self.collectives = collectives

    def __getitem__(self, name: str) -> Properties:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ProgramProperties({dict(self._values)!r})"

    def __str__(self) -> str:
        columns = [field.name for field in fields(Properties)]
        rows = [("value", *columns)]
        rows += [(name, *_row(value, columns)) for name, value in self._values.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


@dataclass(frozen=True)
class CollectiveUse:
    """The calls of a collective along one axis of a mesh.

    Attributes:
        axis: the name of the axis.
        collective: the function (``psum``); sharded results are gathered by ``all_gather``.
        times: the number of calls. Each branch of a choice counts, the body of a loop counts once
            per step, and the body of a ``while_loop`` counts once.
        bytes: the number of bytes that one rank passes to these calls; None if it depends on a
            named dim.
    """

    axis: str
    collective: str
    times: int
    bytes: int | None


def collectives_of(graph: torch.fx.Graph) -> tuple[CollectiveUse, ...]:
    """Return the collectives along mesh axes that a run of the graph calls."""
    counts: dict[tuple[str, str], tuple[int, int | None]] = {}
    _count_exchanges(graph, 1, counts)
    return tuple(CollectiveUse(*key, *count) for key, count in sorted(counts.items()))


def _count_exchanges(
    graph: torch.fx.Graph, repeats: int, counts: dict[tuple[str, str], tuple[int, int | None]]
) -> None:
    for node in graph.nodes:
        if isinstance(node.target, ControlFlow):
            inner = repeats * node.target.run_count(node.args)
            for body in node.target.bodies:
                _count_exchanges(body.graph, inner, counts)
        elif node.target is MAP:
            x, kind, _, axis, _ = node.args
            collective = EXCHANGES[str(kind)].collective
            if collective is None:
                continue
            key = str(axis), collective
            times, sent = counts.get(key, (0, 0))
            size = _bytes_of(properties_of_node(x))
            total = None if size is None or sent is None else sent + repeats * size
            counts[key] = times + repeats, total


def _bytes_of(properties: Properties | None) -> int | None:
    if properties is None or not isinstance(properties.dtype, torch.dtype):
        return None
    elements = 1
    for size in properties.shape:
        if not isinstance(size, int):
            return None
        elements *= size
    return elements * properties.dtype.itemsize


def _row(value: Properties, columns: list[str]) -> Iterator[str]:
    for column in columns:
        cell = getattr(value, column)
        if column == "shape":
            yield f"[{', '.join(map(str, cell))}]" if isinstance(value.dtype, torch.dtype) else ""
        elif isinstance(cell, torch.Tensor):
            yield str(cell.tolist()) if cell.numel() <= _SHOWN else f"{cell.numel()} elements"
        else:
            yield "" if cell is None else _plain(cell)


def _plain(value: object) -> str:
    return value.__name__ if isinstance(value, type) else plain_name(value)


_SHOWN = 8  # maximum number of elements of a constant in a table


def properties_of(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor] | None = None
) -> ProgramProperties:
    """Return the properties of every value of a graph.

    Args:
        constants: the tensors of ``get_attr`` nodes whose data can't change.
    """
    properties = {}
    for node in graph.nodes:
        of_node = properties_of_node(node)
        if of_node is None:
            continue
        constant = (constants or {}).get(str(node.target)) if node.op == "get_attr" else None
        properties[node.name] = of_node if constant is None else replace(of_node, constant=constant)
    return ProgramProperties(properties, collectives_of(graph))


def properties_of_node(node: torch.fx.Node) -> Properties | None:
    """Return the properties of one value; None if they are unknown."""
    value, display = node.meta.get("val"), node.meta.get("display_meta")
    requires_grad = bool(node.meta.get("requires_grad"))
    if "expr" in node.meta:
        kind = float if isinstance(node.meta.get("number"), torch.SymFloat) else int
        return Properties(kind, expression=str(node.meta["expr"]))
    if isinstance(value, torch.Tensor):
        return Properties(value.dtype, dims_of(node), value.device, value.layout, requires_grad)
    # The properties that a file has for data-dependent sizes.
    return (
        replace(display, requires_grad=requires_grad) if isinstance(display, Properties) else None
    )


def dims_of(node: torch.fx.Node) -> tuple[int | str, ...]:
    """Return the sizes of a node's tensor: numbers, and expressions of named dims as text."""
    dims = node.meta.get("dims") or node.meta["val"].shape
    return tuple(int(dim) if str(dim).isdigit() else str(dim) for dim in dims)


# --- drawing of a program: an SVG picture of its graph, with a row per distance from the inputs


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


def draw(name: str, graph: torch.fx.Graph, properties: ProgramProperties) -> str:
    """Return a graph as SVG text.

    A value is in the row below its lowest argument, near the middle of its arguments. A tooltip
    shows the user's line.

    Args:
        graph: the graph; unused values are left out.
    """
    nodes = [node for node in graph.nodes if node.users or node.op == "output"]
    rows = _rows(nodes)
    widths = {node: _width(node, properties) for node in nodes}
    middles = _middles(rows, widths)
    left = min(middles[node] - widths[node] / 2 for node in nodes)
    boxes = {
        node: _Box(
            middles[node] - left + _MARGIN,
            _MARGIN + i * _ROW,
            widths[node],
            _title(node),
            _type(node, properties),
            _COLOURS.get(node.op, "#fff"),
            str(node.meta.get("location") or node.name),
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
        *(_draw_box(box) for box in boxes.values()),
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
        selected = {}
        for node in row:
            above = [middles[arg] for arg in node.all_input_nodes if arg in middles]
            selected[node] = sum(above) / len(above) if above else 0.0
        edge = float("-inf")
        for node in sorted(row, key=selected.__getitem__):
            middles[node] = max(selected[node], edge + widths[node] / 2)
            edge = middles[node] + widths[node] / 2 + _GAP
        if row:  # the shift to the right is averaged over the row
            shift = sum(middles[node] - selected[node] for node in row) / len(row)
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
        return f"[{', '.join(_argument(item) for item in value)}]"
    return "·" if isinstance(value, torch.fx.Node) else plain_name(value)


def _type(node: torch.fx.Node, properties: ProgramProperties) -> str:
    return str(properties[node.name]) if node.name in properties else ""


def _width(node: torch.fx.Node, properties: ProgramProperties) -> float:
    return max(len(_title(node)), len(_type(node, properties)), 6) * _CHARACTER + 12


def _arrow(start: _Box, end: _Box) -> str:
    y, below = start.y + _HEIGHT, end.y
    half = (y + below) / 2
    return (
        f'<path d="M{start.x:.0f} {y:.0f}C{start.x:.0f} {half:.0f} {end.x:.0f} {half:.0f} '
        f'{end.x:.0f} {below:.0f}"/>'
    )


def _draw_box(box: _Box) -> str:
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
