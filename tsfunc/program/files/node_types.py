"""Types of the tensors in a graph, as JSON and back: dtypes, sizes, strides, devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.sizes.size_forms import OPERATORS, form_of_size, is_small, size_of_form
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.tracers import torch_state
from tsfunc.dispatch import state
from tsfunc.program.files.fields import Field
from tsfunc.program.files.values import ValueReader, dtype_of, printable
from tsfunc.program.graphs.properties import Properties, properties_of_node

_MOST_PARTS = 1000  # the maximum number of operators and operands of one size


def encode_type(value: torch.Tensor, names: Mapping[Any, Any]) -> Any | None:
    """Return a fake tensor as JSON; None if its sizes are not expressions of named dims."""
    if value.layout is not torch.strided:
        return None
    shape = [form_of_size(size, names) for size in value.shape]
    strides = [form_of_size(step, names) for step in value.stride()]
    if None in shape or None in strides:
        return None
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": shape,
        "strides": strides,
        "device": str(value.device),
    }


_KINDS_OF_NUMBERS = {"int": int, "float": float}


def encode_display_meta(node: torch.fx.Node) -> Any | None:
    """Return the displayed properties of a value as JSON, if `encode_type` can't write it."""
    known = properties_of_node(node)
    if known is None:
        return None
    if isinstance(known.dtype, type):
        return {"number": known.dtype.__name__, "text": printable(known.expression or "")}
    if known.layout is not torch.strided:
        return None
    return {
        "dtype": str(known.dtype).removeprefix("torch."),
        "shape": [dim if isinstance(dim, int) else printable(dim) for dim in known.shape],
        "device": str(known.device),
    }


class NodeTypes:
    """Reads types, and sets the fake tensors of nodes from them.

    Args:
        symbols: has the named dims.
        values: reads devices.
    """

    def __init__(self, symbols: Symbols, values: ValueReader) -> None:
        self._symbols = symbols
        self._named = {**symbols.sizes, **symbols.scalars}
        self._values = values
        self._sizes: dict[str, Any] = {}
        self._types: dict[str, torch.Tensor] = {}

    def read(self, field: Field, node: torch.fx.Node) -> None:
        """Set the type of a node; nodes of the same type share a fake tensor.

        Each input has its own fake tensor, so that the graph can be called with them.
        """
        key = json.dumps(field.value)
        if node.op == "placeholder" or key not in self._types:
            self._types[key] = self._tensor(field)
        node.meta["val"] = self._types[key]
        node.meta["dims"] = tuple(map(self._symbols.spell_size, self._types[key].shape))

    def _tensor(self, field: Field) -> torch.Tensor:
        """Return a fake tensor of a type."""
        dtype, shape_field, stride_field, device = field.record(
            "dtype", "shape", "strides", "device"
        )
        shape = [self._size(size) for size in shape_field.items()]
        strides = [self._size(step) for step in stride_field.items(len(shape))]
        with torch_state.outside_all_levels(), state.outside_all_levels(), self._symbols.fake:
            try:
                return torch.empty_strided(
                    shape, strides, dtype=dtype_of(dtype), device=self._values.device(device)
                )
            except (RuntimeError, OverflowError, ValueError, TypeError) as error:
                field.fail(f"there is no such tensor: {str(error).splitlines()[0]}")

    def read_display_meta(self, field: Field, node: torch.fx.Node) -> None:
        """Set the properties that `encode_display_meta` wrote on a node, for display."""
        if field.get("number") is not None:
            number, text = field.record("number", "text")
            kind = number.one_of(_KINDS_OF_NUMBERS, "int or float")
            node.meta["display_meta"] = Properties(kind, expression=text.line())
            return
        dtype, shape, device = field.record("dtype", "shape", "device")
        dims = [
            dim.integer(0) if isinstance(dim.value, int) else dim.line() for dim in shape.items()
        ]
        node.meta["display_meta"] = Properties(
            dtype_of(dtype), tuple(dims), self._values.device(device), torch.strided
        )

    def read_number(self, field: Field, node: torch.fx.Node) -> None:
        """Set the size of a node that is a number."""
        size = self._size(field)
        node.meta["number"] = size
        node.meta["expr"] = self._symbols.spell_size(size)

    def _size(self, field: Field) -> Any:
        if type(field.value) is int:
            return field.integer(0)
        key = json.dumps(field.value)
        if key not in self._sizes:
            self._count(field, _MOST_PARTS)
            if not is_small(field.value):
                field.fail("the size is too long")
            try:
                self._sizes[key] = size_of_form(field.value, self._named)
            except (ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
                field.fail(f"not a size: {error}")
        return self._sizes[key]

    def _count(self, field: Field, left: int) -> int:
        """Check the parts of a size; return the number of parts that are still allowed."""
        if type(field.value) is list:
            for part in field.items():
                left = self._count(part, left)
        elif type(field.value) is int:
            field.integer()
        elif type(field.value) is not str or (
            field.value not in OPERATORS and field.value not in self._named
        ):
            field.expected("a size")
        if left <= 0:
            field.fail("the size is too long")
        return left - 1
