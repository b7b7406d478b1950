"""Values as JSON: arguments of operators, and arguments of a function that are constants.

A value that JSON has is written directly. Any other value is an object with one key, its kind::

    3   1.5   true   null   "sum"   [1, 2]
    {"float": "nan"}   {"complex": [0.0, 1.0]}   {"tuple": [1, 2]}   {"dict": [["k", 1]]}
    {"slice": [0, null, 2]}   {"dtype": "float32"}   {"layout": "strided"}
    {"memory_format": "channels_last"}   {"device": "cuda:0"}   {"size": [2, 3]}
    {"node": "x"}                                        the value of a node, in a graph
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tsfunc.program.files.fields import Field


def _constants(kind: type) -> dict[str, Any]:
    return {
        str(value).removeprefix("torch."): value
        for value in vars(torch).values()
        if isinstance(value, kind)
    }


DTYPES: dict[str, torch.dtype] = _constants(torch.dtype)
_LAYOUTS: dict[str, torch.layout] = _constants(torch.layout)
_FORMATS: dict[str, torch.memory_format] = _constants(torch.memory_format)
_FLOATS = {"nan": math.nan, "-nan": math.copysign(math.nan, -1), "inf": math.inf, "-inf": -math.inf}
_DEVICE = re.compile(r"[a-z]{1,20}(?::[0-9]{1,4})?")


class NoFileForm(Exception):
    """A value that a file can't hold.

    Args:
        what: a description of the value.
        why: the rest of the message; if it is empty, a list of the values that files can hold.
    """

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what)
        self.why = why

    def within(self, where: str) -> NoFileForm:
        """Return the same error with a place."""
        return NoFileForm(f"{self}{where}", self.why)


def _float_text(value: float) -> str:
    """Return a float that is not finite as a text, with its sign."""
    return "-nan" if math.isnan(value) and math.copysign(1, value) < 0 else str(value)


def encode(
    value: Any,
    node: Callable[[Any], str] | None = None,
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a value as JSON.

    Args:
        value: the value.
        node: returns the name of a graph's node; without it, nodes are refused.
        other: returns the JSON of a value of another kind, or None.

    Raises:
        NoFileForm: a file can't hold a value of this type.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": _float_text(value)}
    found = other(value) if other is not None else None
    if found is not None:
        return found
    if isinstance(value, torch.fx.Node) and node is not None:
        return {"node": node(value)}
    if isinstance(value, list) and type(value).__module__ in (
        "builtins",
        "torch.fx.immutable_collections",
    ):
        return [encode(item, node, other) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item, node, other) for item in value]}
    if isinstance(value, torch.Size):
        return {"size": [encode(item, node, other) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item, node, other)] for key, item in value.items()]}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if type(value) is slice:
        return {"slice": [encode(x, node, other) for x in (value.start, value.stop, value.step)]}
    return {_kind(value): _spell(value)}


def printable(text: str) -> str:
    """Return a text as one line of printable characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def _kind(value: Any) -> str:
    for kind, name in _NAMED.items():
        if isinstance(value, kind):
            return name
    raise NoFileForm(f"a {type(value).__name__}")


_NAMED: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.device: "device",
}


def _spell(value: Any) -> str:
    return str(value).removeprefix("torch.")


class ValueReader:
    """Reads values.

    Args:
        node: returns the node of a name, in a graph; without it, nodes are refused.
        device: replaces every device of a file, if it is given.
    """

    def __init__(
        self, node: Callable[[Field], Any] | None = None, device: torch.device | None = None
    ) -> None:
        self._node = node
        self._device = device
        self._other: Mapping[str, Callable[[Field], Any]] = {}

    def with_other(self, kinds: Mapping[str, Callable[[Field], Any]]) -> ValueReader:
        """Return a reader of more kinds of values, given a reader for each kind."""
        found = ValueReader(self._node, self._device)
        found._other = kinds
        return found

    def decode(self, field: Field) -> Any:
        """Return the value that `encode` wrote."""
        value = field.value
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            return field.integer(-(1 << 64), 1 << 64)
        if type(value) is list:
            return [self.decode(item) for item in field.items()]
        if type(value) is dict and len(value) == 1:
            ((kind, inner),) = field.mapping().items()
            own = getattr(self, f"_read_{kind}", None) if kind in _KINDS else None
            read = self._other.get(kind, own)
            if read is not None:
                return read(inner)
        return field.expected("a value")

    def _read_node(self, field: Field) -> Any:
        return field.fail("there are no nodes here") if self._node is None else self._node(field)

    def _read_float(self, field: Field) -> float:
        return float(field.one_of(_FLOATS, "nan, -nan, inf or -inf"))

    def _read_complex(self, field: Field) -> complex:
        real, imag = (self.decode(part) for part in field.items(2))
        if type(real) is not float or type(imag) is not float:
            field.expected("two floats")
        return complex(real, imag)

    def _read_tuple(self, field: Field) -> tuple[Any, ...]:
        return tuple(self.decode(item) for item in field.items())

    def _read_size(self, field: Field) -> Any:
        sizes = [self.decode(item) for item in field.items()]
        if not all(type(size) is int for size in sizes):
            return tuple(sizes)  # contains nodes: the program makes the size from it
        return torch.Size([item.integer() for item in field.items()])

    def _read_dict(self, field: Field) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in field.items():
            key, value = pair.items(2)
            decoded = self.decode(key)
            if type(decoded) not in (str, int, bool, float, type(None)) or decoded in found:
                key.expected("another key, a text or a number")
            found[decoded] = self.decode(value)
        return found

    def _read_slice(self, field: Field) -> slice:
        return slice(*(self.decode(part) for part in field.items(3)))

    def _read_dtype(self, field: Field) -> torch.dtype:
        return dtype_of(field)

    def _read_layout(self, field: Field) -> Any:
        return field.one_of(_LAYOUTS, "a layout of torch")

    def _read_memory_format(self, field: Field) -> Any:
        return field.one_of(_FORMATS, "a memory format of torch")

    def _read_device(self, field: Field) -> torch.device:
        return self.device(field)

    def device(self, field: Field) -> torch.device:
        """Return the device of a name, or the device that replaces it."""
        try:
            found = torch.device(field.text(_DEVICE, "a device"))
        except RuntimeError:
            field.expected("a device that torch knows")
        return found if self._device is None else self._device


_KINDS = frozenset(
    name.removeprefix("_read_") for name in vars(ValueReader) if name.startswith("_read_")
)


def dtype_of(field: Field) -> torch.dtype:
    """Return the dtype of a name."""
    found: torch.dtype = field.one_of(DTYPES, "a dtype of torch")
    return found
