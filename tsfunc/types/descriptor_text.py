"""Descriptors as text: what ``str`` of a descriptor wrote, read back.

A descriptor is written as a type is, and beside that::

    X | Y   Tuple[X, ...]   Literal[3]   [X, Y]   {'key': X}   module.Class(field: X)
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.errors import AnnotationError
from tsfunc.types.annotation import from_annotation
from tsfunc.types.class_names import NAME
from tsfunc.types.classes import is_interface, names_of_class
from tsfunc.types.descriptors import class_type
from tsfunc.types.grammar import (
    NONE,
    Descriptor,
    TSDict,
    TSFields,
    TSList,
    TSNamedTuple,
    TSPytree,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSUnion,
    Value,
)
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.reader import Reader
from tsfunc.types.reading import as_descriptor
from tsfunc.types.text import WORDS, TypeReader
from tsfunc.types.values import Attribute


def parse_descriptor(text: str, scope: Mapping[str, object] | None = None) -> Descriptor:
    """The descriptor that a text says; the inverse of ``str``.

    Values that have no text of their own (a tensor, an object) can't be read back.

    Args:
        text: a descriptor as its ``str`` is.
        scope: what the names of classes in the text stand for, see `parse`.

    Raises:
        AnnotationError: the text is no descriptor.

    Example:
        >>> text = "{'w': List[f32[n, 64]], 'mode': Literal['sum'] | None}"
        >>> str(parse_descriptor(text)) == text
        True
    """
    return _DescriptorReader(text, scope or {}).read()


_LITERAL = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\""
    r"|\([^()]*\)|[-+]?(?:inf|nan)\b|[-+]?\d[\w.+-]*"
)


class _DescriptorReader(Reader[Descriptor]):
    what = "descriptor"

    def term(self) -> Descriptor:
        if self.take(r"\["):
            items = [] if self.take(r"\]") else self.items("]")
            return TSPytree(list, tuple(range(len(items))), tuple(items))
        if self.take(r"\{"):
            entries, children = self.pairs("}", self.literal)
            return TSPytree(dict, entries, children)
        if self.take(r"Literal\["):
            value = self.literal()
            self.need("]", "after the value")
            return Value(value)
        return super().term()

    def literal(self) -> Any:
        text = self.take(_LITERAL)
        if text is not None:
            return _literal(text)
        name = self.take(NAME)
        if name is None:
            raise self.error(f"expected a value, got {self.rest()[:20]!r}")
        if name in ("None", "True", "False"):
            return ast.literal_eval(name)
        *path, last = name.split(".")
        home = self.look_up(".".join(path)) if path and path != ["torch"] else torch
        members = getattr(home, "__members__", None)
        return members[last] if members and last in members else self.look_up(name)

    def pairs(
        self, end: str, entry: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], tuple[Descriptor, ...]]:
        entries: list[Any] = []
        children: list[Descriptor] = []
        while self.take(re.escape(end)) is None:
            if entries:
                self.need(",", f"or {end!r}")
            entries.append(entry())
            self.need(":", "after the key")
            children.append(self.union())
        return tuple(entries), tuple(children)

    def resolve(self, found: Any) -> Descriptor:
        if not isinstance(found, type) or is_interface(found):
            return as_descriptor(found)
        # What is said of its fields stands in the text.
        return self.container(found) if self.take(r"\(") else class_type(found)

    def container(self, cls: type) -> Descriptor:
        """After ``module.Class(``: attributes of an object, fields or entries of a container."""
        entries, children = self.pairs(")", self.entry)
        if entries and all(isinstance(entry, Attribute) for entry in entries):
            return TSFields(cls, tuple(map(str, entries)), children)
        names = names_of_class(cls)
        if names is None:
            return TSPytree(cls, entries, children)
        if entries != names:
            raise self.error(f"{cls.__name__} has the fields {list(names)}, got {list(entries)}")
        return TSPytree(cls, tuple(range(len(names))), children)

    def entry(self) -> Any:
        attribute = self.take(r"\.[^\W\d]\w*")
        if attribute is not None:
            return Attribute(attribute[1:])
        return self.take(r"[^\W\d]\w*(?=\s*:)") or self.literal()

    # --- what is made of it

    def word(self, name: str) -> Descriptor | None:
        return as_descriptor(WORDS[name]) if name in WORDS else None

    def described(self, meta: MetaTensorType) -> Descriptor:
        return TSTensor(meta=meta)

    def unite(self, members: Sequence[Descriptor]) -> Descriptor:
        return members[0] if len(members) == 1 else TSUnion(tuple(members))

    def compose(self, name: str, items: Sequence[Descriptor]) -> Descriptor:
        count = len(items)
        if name in ("List", "list") and count == 1:
            return TSList(items[0])
        if name in ("Dict", "dict") and count == 2:
            return TSDict(items[0], items[1])
        if name == "Optional" and count == 1:
            return TSUnion((items[0], NONE))
        if name == "Union" and count:
            return self.unite(items)
        raise AnnotationError(f"{name} of {count} descriptor(s) is none")

    def composed(self, name: str) -> Descriptor:
        if name.split(".")[-1] in ("Future", "RRef"):  # of a type, not of a descriptor
            inner = TypeReader(self.text, self.scope, lambda cls: from_annotation(cls, self.scope))
            inner.at = self.at
            found = inner.composed(name)
            self.at = inner.at
            return found
        return self.tuple_of() if name in ("Tuple", "tuple") else super().composed(name)

    def tuple_of(self) -> Descriptor:
        """After ``Tuple``: of any length, or of these elements."""
        self.need("[", "after Tuple")
        if self.take(r"\(\s*\)"):
            self.need("]", "after ()")
            return TSTuple(())
        items = [self.union()]
        if self.take(r",\s*\.\.\."):
            self.need("]", "after ...")
            return TSTupleOf(items[0])
        while self.take(","):
            items.append(self.union())
        self.need("]", "or ','")
        return TSTuple(tuple(items))

    def fields(self, names: tuple[str, ...], elements: tuple[Descriptor, ...]) -> Descriptor:
        return TSNamedTuple(names, elements)

    def annotated(self, base: Descriptor, more: Descriptor) -> Descriptor | None:
        if isinstance(base, TSTensor) and isinstance(more, TSTensor):
            return TSTensor(base.cls, more.meta)
        return None


def _literal(text: str) -> Any:
    sign = -1 if text.startswith("-") else 1
    if text.lstrip("+-") in ("inf", "nan"):
        return sign * (math.inf if text.endswith("inf") else math.nan)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise AnnotationError(f"{text!r} is no value") from None
