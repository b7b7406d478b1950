"""Properties of a program's values that are known before it runs."""

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
    """The known properties of one value of a program.

    Attributes:
        dtype: the dtype of a tensor; the Python type of a number.
        shape: the sizes of a tensor: for each dim a number, or an expression of named dims.
        device: the device of a tensor.
        layout: the layout of a tensor.
        requires_grad: whether autograd records the value in a call of the program itself.
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
            program.
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


_SHOWN = 8  # maximum number of elements of a constant in a table


def properties_of(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor] | None = None
) -> ProgramProperties:
    """Return the properties of every value of a graph.

    Args:
        graph: a traced graph.
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
