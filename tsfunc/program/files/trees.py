"""Structures of pytrees as JSON, and back.

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
from collections.abc import Mapping
from typing import Any

import optree

from tsfunc import pytrees
from tsfunc.program.files.fields import Field
from tsfunc.program.files.values import NoFileForm, ValueReader, encode
from tsfunc.types.values import class_name, find

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
    kept = pytrees.parts_of_dataclass(value)
    if kept is None:
        raise NoFileForm(f"a container of class {class_name(kind)}")
    children, data = kept
    return {
        "class": class_name(kind),
        "children": [[name, _encode(child)] for name, child in children.items()],
        "data": [[name, encode(each)] for name, each in data.items()],
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
        """Return the structure that `encode_tree` wrote."""
        tree = self._decode(field)
        try:
            return pytrees.structure_of(tree)
        except (RecursionError, ValueError, TypeError) as error:
            field.fail(f"not a structure of containers: {error}")

    def _decode(self, field: Field) -> Any:
        if field.value == _LEAF:
            return _Leaf()
        if type(field.value) is not dict:
            field.expected("a structure")
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
        return field.expected("a structure")

    def _pairs(self, field: Field) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in field.items():
            key_field, child = pair.items(2)
            key = self._values.decode(key_field)
            try:
                known = key in found
            except TypeError:
                known = True
            if known:
                key_field.expected("another key")
            found[key] = self._decode(child)
        return found

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
        kept = {}
        for pair in data.items():
            name, value = pair.items(2)
            kept[_attribute(name)] = self._values.decode(value)
        made = pytrees.dataclass_of_parts(cls, parts, kept)
        return field.fail(f"{cls.__name__} is not a container") if made is None else made

    def class_of(self, field: Field) -> Any:
        """Return the class of a name."""
        name = field.text()
        found = self._classes.get(name) or (find(name, {}) if len(name) < 300 else None)
        if not isinstance(found, type):
            field.fail(
                f"the class {name[:80]!r} is not known here: import the module that has it, or "
                f"give it by its name: load(path, classes={{{name[:80]!r}: ...}})"
            )
        return found


def _attribute(field: Field) -> str:
    name = field.text()
    if not name.isidentifier() or name.startswith("__"):
        field.expected("the name of an attribute")
    return name
