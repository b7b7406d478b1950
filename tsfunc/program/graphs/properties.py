"""What is known of a program's values before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.mesh.engine import COLLECTIVES
from tsfunc.bridge.mesh.operators import MAP

Number = int | float | bool


@dataclass(frozen=True)
class Properties:
    """What is known of one value of a program.

    Attributes:
        dtype: of a tensor; the Python type of a number.
        shape: of a tensor: a number, or the expression that it is in the named dims, for each dim.
        device: of a tensor.
        layout: of a tensor.
        requires_grad: whether autograd records there, as the program itself is called.
        constant: its value, if the program has that: one that is computed from constants alone.
        expression: of a number: what it is in the named dims.
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
        collectives: how often a run of the program calls each collective along each axis of a mesh.
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
    """How often a collective is called along one axis of a mesh.

    Attributes:
        axis: the name of the axis.
        collective: the function (``psum``); what puts sharded results together is ``all_gather``.
        times: how often. A program counts each branch of a choice, the body of a loop as often as
            the loop is long, and that of a ``while_loop`` once.
        bytes: how many bytes one rank gives to these calls; None where a named dim decides that.
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
            inner = repeats * node.target.steps(node.args)
            for body in node.target.bodies:
                _count_exchanges(body.graph, inner, counts)
        elif node.target is MAP and str(node.args[1]) in COLLECTIVES:
            x, kind, _, axis, _ = node.args
            key = str(axis), COLLECTIVES[str(kind)]
            times, sent = counts.get(key, (0, 0))
            size = _bytes_of(properties_of_node(x))
            total = None if size is None or sent is None else sent + repeats * size
            counts[key] = times + repeats, total


def _bytes_of(known: Properties | None) -> int | None:
    if known is None or not isinstance(known.dtype, torch.dtype):
        return None
    elements = 1
    for size in known.shape:
        if not isinstance(size, int):
            return None
        elements *= size
    return elements * known.dtype.itemsize


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
    return value.__name__ if isinstance(value, type) else str(value).removeprefix("torch.")


_SHOWN = 8  # elements of a constant that a table shows


def properties_of(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor] | None = None
) -> ProgramProperties:
    """The properties of every value of a graph.

    Args:
        graph: as it was traced.
        constants: the tensors of ``get_attr`` nodes whose data can't change.
    """
    found = {}
    for node in graph.nodes:
        known = properties_of_node(node)
        if known is None:
            continue
        constant = (constants or {}).get(str(node.target)) if node.op == "get_attr" else None
        found[node.name] = known if constant is None else replace(known, constant=constant)
    return ProgramProperties(found, collectives_of(graph))


def properties_of_node(node: torch.fx.Node) -> Properties | None:
    """The properties of one value; None where nothing is known of it."""
    value, told = node.meta.get("val"), node.meta.get("told")
    requires_grad = bool(node.meta.get("requires_grad"))
    if "expr" in node.meta:
        kind = float if isinstance(node.meta.get("number"), torch.SymFloat) else int
        return Properties(kind, expression=str(node.meta["expr"]))
    if isinstance(value, torch.Tensor):
        return Properties(value.dtype, dims_of(node), value.device, value.layout, requires_grad)
    # What a file says of sizes that data give.
    return replace(told, requires_grad=requires_grad) if isinstance(told, Properties) else None


def dims_of(node: torch.fx.Node) -> tuple[int | str, ...]:
    """The sizes of a node's tensor: numbers, and expressions in the named dims as text."""
    dims = node.meta.get("dims") or node.meta["val"].shape
    return tuple(int(dim) if str(dim).isdigit() else str(dim) for dim in dims)
