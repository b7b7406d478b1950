"""Values and trees of programs as JSON.

A value that JSON has is written directly. Any other value is an object with one key, its kind::

    3   1.5   true   null   "sum"   [1, 2]
    {"float": "nan"}   {"complex": [0.0, 1.0]}   {"tuple": [1, 2]}   {"dict": [["k", 1]]}
    {"slice": [0, null, 2]}   {"dtype": "float32"}   {"layout": "strided"}
    {"memory_format": "channels_last"}   {"device": "cuda:0"}   {"size": [2, 3]}
    {"node": "x"}                                        the value of a node, in a graph

    "*"                                     a leaf
    {"tuple": [X, ...]}  {"list": [X, ...]}  {"dict": [[KEY, X], ...]}
    {"ordered_dict": [[KEY, X], ...]}  {"deque": [MAXLEN, [X, ...]]}
    {"class": NAME, "children": [X, ...]}   a named tuple, or a return type of torch
    {"class": NAME, "children": [X, ...], "data": [[NAME, VALUE], ...]}      a dataclass

A class is looked up by name among the imported classes and those that the caller passes. No module
is imported for it, and its instances must be containers.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.program.fields import Field
from tsfunc.types.values import class_name, find_object, plain_name

# --- values as JSON: arguments of operators, and arguments of a function that are constants


def _constants(kind: type) -> dict[str, Any]:
    return {plain_name(value): value for value in vars(torch).values() if isinstance(value, kind)}


DTYPES: dict[str, torch.dtype] = _constants(torch.dtype)
_LAYOUTS: dict[str, torch.layout] = _constants(torch.layout)
_FORMATS: dict[str, torch.memory_format] = _constants(torch.memory_format)
_FLOATS = {"nan": math.nan, "-nan": math.copysign(math.nan, -1), "inf": math.inf, "-inf": -math.inf}
_DEVICE = re.compile(r"[a-z]{1,20}(?::[0-9]{1,4})?")


class NoFileForm(Exception):
    """A value that a file can't hold.

    Args:
        why: the rest of the message; if it is empty, a list of the values that files can hold.
    """

    def __init__(self, description: str, why: str = "") -> None:
        super().__init__(description)
        self.why = why

    def within(self, where: str) -> NoFileForm:
        """Return the same error with a path."""
        return NoFileForm(f"{self}{where}", self.why)


def _float_text(value: float) -> str:
    """Return a float that is not finite as a text, with its sign."""
    return "-nan" if math.isnan(value) and math.copysign(1, value) < 0 else str(value)


def encode(
    value: Any, node: Callable[[Any], str] | None = None, other: Callable[[Any], Any] | None = None
) -> Any:
    """Return a value as JSON.

    Args:
        node: returns the name of a graph's node; without it, nodes are refused.
        other: returns the JSON of a value of another kind, or None.

    Raises:
        NoFileForm: a file can't hold a value of this type.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": _float_text(value)}
    encoded = other(value) if other is not None else None
    if encoded is not None:
        return encoded
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
    return {_kind(value): plain_name(value)}


def printable_text(text: str) -> str:
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
        reader = ValueReader(self._node, self._device)
        reader._other = kinds
        return reader

    def decode(self, field: Field) -> Any:
        """Return the value that ``encode`` wrote."""
        value = field.value
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            return field.integer(-(1 << 64), 1 << 64)
        if type(value) is list:
            return [self.decode(item) for item in field.items()]
        if type(value) is dict and len(value) == 1:
            ((kind, inner),) = field.mapping().items()
            read_kind = getattr(self, f"_read_{kind}", None) if kind in _KINDS else None
            read = self._other.get(kind, read_kind)
            if read is not None:
                return read(inner)
        return field.fail_expected("a value")

    def _read_node(self, field: Field) -> Any:
        return field.fail("there are no nodes here") if self._node is None else self._node(field)

    def _read_float(self, field: Field) -> float:
        return float(field.one_of(_FLOATS, "nan, -nan, inf or -inf"))

    def _read_complex(self, field: Field) -> complex:
        real, imag = (self.decode(part) for part in field.items(2))
        if type(real) is not float or type(imag) is not float:
            field.fail_expected("two floats")
        return complex(real, imag)

    def _read_tuple(self, field: Field) -> tuple[Any, ...]:
        return tuple(self.decode(item) for item in field.items())

    def _read_size(self, field: Field) -> Any:
        sizes = [self.decode(item) for item in field.items()]
        if not all(type(size) is int for size in sizes):
            return tuple(sizes)  # contains nodes: the program makes the size from it
        return torch.Size([item.integer() for item in field.items()])

    def _read_dict(self, field: Field) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        for pair in field.items():
            key, value = pair.items(2)
            decoded = self.decode(key)
            if type(decoded) not in (str, int, bool, float, type(None)) or decoded in items:
                key.fail_expected("another key, a text or a number")
            items[decoded] = self.decode(value)
        return items

    def _read_slice(self, field: Field) -> slice:
        return slice(*(self.decode(part) for part in field.items(3)))

    def _read_dtype(self, field: Field) -> torch.dtype:
        return self.dtype(field)

    def _read_layout(self, field: Field) -> Any:
        return field.one_of(_LAYOUTS, "a layout of torch")

    def _read_memory_format(self, field: Field) -> Any:
        return field.one_of(_FORMATS, "a memory format of torch")

    def _read_device(self, field: Field) -> torch.device:
        return self.device(field)

    def dtype(self, field: Field) -> torch.dtype:
        return field.one_of(DTYPES, "a dtype of torch")

    def device(self, field: Field) -> torch.device:
        """Return the device of a name, or the device that replaces it."""
        try:
            named = torch.device(field.text(_DEVICE, "a device"))
        except RuntimeError:
            field.fail_expected("a device of torch")
        return named if self._device is None else self._device


_KINDS = frozenset(
    name.removeprefix("_read_") for name in vars(ValueReader) if name.startswith("_read_")
)


# --- structures of pytrees as JSON, and back


_LEAF = "*"


class _Leaf:
    """A leaf of a structure that is being written or read."""


def encode_tree(tree: optree.PyTreeSpec) -> Any:
    """Return a structure as JSON.

    Raises:
        NoFileForm: it has containers that a file can't hold.
    """
    try:
        whole = optree.tree_unflatten(tree, [_Leaf() for _ in range(tree.num_leaves)])
    except Exception as error:
        raise NoFileForm(f"a container that takes only some elements ({error})") from None
    return _encode(whole)


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is _Leaf:
        return _LEAF
    if kind in (tuple, list):
        return {kind.__name__: [_encode(item) for item in value]}
    if kind is dict or kind is collections.OrderedDict:
        name = "dict" if kind is dict else "ordered_dict"
        return {name: [[encode(key), _encode(item)] for key, item in value.items()]}
    if kind is collections.deque:
        return {"deque": [value.maxlen, [_encode(item) for item in value]]}
    if optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind):
        return {"class": class_name(kind), "children": [_encode(item) for item in value]}
    parts = pytrees.parts_of_dataclass(value)
    if parts is None:
        raise NoFileForm(f"a container of class {class_name(kind)}")
    children, data = parts
    return {
        "class": class_name(kind),
        "children": [[name, _encode(child)] for name, child in children.items()],
        "data": [[name, encode(item)] for name, item in data.items()],
    }


class Trees:
    """Reads structures.

    Args:
        classes: classes by name, which take precedence over imported ones.
        values: reads the keys of dicts and the constants of dataclasses.
    """

    def __init__(self, classes: Mapping[str, type], values: ValueReader) -> None:
        self._classes = classes
        self._values = values

    def decode(self, field: Field) -> optree.PyTreeSpec:
        """Return the structure that ``encode_tree`` wrote."""
        tree = self._decode(field)
        try:
            return pytrees.structure_of(tree)
        except (RecursionError, ValueError, TypeError) as error:
            field.fail(f"not a structure of containers: {error}")

    def _decode(self, field: Field) -> Any:
        if field.value == _LEAF:
            return _Leaf()
        if type(field.value) is not dict:
            field.fail_expected("a structure")
        if "class" in field.value:
            return self._instance(field)
        ((kind, inner),) = field.mapping().items() if len(field.value) == 1 else ((None, field),)
        if kind in ("tuple", "list"):
            items = [self._decode(item) for item in inner.items()]
            return tuple(items) if kind == "tuple" else items
        if kind in ("dict", "ordered_dict"):
            pairs = self._pairs(inner)
            return pairs if kind == "dict" else collections.OrderedDict(pairs)
        if kind == "deque":
            most, items_field = inner.items(2)
            length = None if most.value is None else most.integer(0)
            items = [self._decode(item) for item in items_field.items()]
            if length is not None and len(items) > length:
                items_field.fail(f"a deque of at most {length} has more items")
            return collections.deque(items, length)
        return field.fail_expected("a structure")

    def _pairs(self, field: Field) -> dict[Any, Any]:
        children: dict[Any, Any] = {}
        for pair in field.items():
            key_field, child = pair.items(2)
            key = self._values.decode(key_field)
            try:
                is_child = key in children
            except TypeError:
                is_child = True
            if is_child:
                key_field.fail_expected("another key")
            children[key] = self._decode(child)
        return children

    def _instance(self, field: Field) -> Any:
        cls = self.class_of(Field(field.value["class"], field, "class"))
        if optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls):
            _, children = field.record("class", "children")
            fields = optree.namedtuple_fields if optree.is_namedtuple_class(cls) else (
                optree.structseq_fields
            )  # fmt: skip
            items = [self._decode(item) for item in children.items(len(fields(cls)))]
            return tuple.__new__(cls, items) if fields is optree.namedtuple_fields else cls(items)
        _, children, data = field.record("class", "children", "data")
        parts = {}
        for pair in children.items():
            name, child = pair.items(2)
            parts[_attribute(name)] = self._decode(child)
        attributes = {}
        for pair in data.items():
            name, value = pair.items(2)
            attributes[_attribute(name)] = self._values.decode(value)
        instance = pytrees.dataclass_of_parts(cls, parts, attributes)
        return field.fail(f"{cls.__name__} is not a container") if instance is None else instance

    def class_of(self, field: Field) -> Any:
        name = field.text()
        cls = self._classes.get(name) or (find_object(name, {}) if len(name) < 300 else None)
        if not isinstance(cls, type):
            field.fail(
                f"the class {name[:80]!r} is not known here: import the module that has it, or "
                f"give it by its name: load(path, classes={{{name[:80]!r}: ...}})"
            )
        return cls


def _attribute(field: Field) -> str:
    name = field.text()
    if not name.isidentifier() or name.startswith("__"):
        field.fail_expected("the name of an attribute")
    return name
