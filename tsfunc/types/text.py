"""Types as text: the parser of texts from ``str`` of a type or descriptor, or written by hand.

    type     = term ("|" term)*                       in types, unions are only with None
    term     = NAME | NAME "[" type ("," type)* "]"   Any int List[X] Dict[K, V] Optional[X]
             | "namedtuple" "(" field ("," field)* ")"
             | tensor                                 f32[n, 64] cpu
    field    = [NAME ":"] type
    tensor   = DTYPE "[" dims "]" words               words: cpu requires_grad strided

Descriptors have these terms too::

    Tuple[X, ...]   Literal[3]   [X, Y]   {'key': X}   module.Class(field: X)

Other names refer to classes: see ``tsfunc.types.values``.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.base import TSType
from tsfunc.types.containers import TSDict, TSFields, TSNamedTuple, TSPytree, TSTuple, TSTupleOf
from tsfunc.types.grammar import GENERIC
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.single import ANY, DOUBLE, FLOAT, NONE, PRIMITIVES, TENSOR, TSTensor, Value
from tsfunc.types.unions import TSOptional, TSUnion, optional
from tsfunc.types.values import (
    NAME,
    TENSOR_KINDS,
    TENSOR_NAMES,
    TENSOR_WORD,
    Attribute,
    find_object,
    names_of_class,
    tensor_fields,
)

Resolve = Callable[[Any], TSType]
"""Returns the type of an object that a name stands for."""

_OTHERS = ("Union", "Annotated")

WORDS: dict[str, TSType] = {
    **{type_.name: type_ for type_ in PRIMITIVES},
    **dict.fromkeys(TENSOR_NAMES, TENSOR),
    "Any": ANY,
    "object": ANY,
    "NoneType": NONE,
}

_LITERAL = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\""
    r"|\([^()]*\)|[-+]?(?:inf|nan)\b|[-+]?\d[\w.+-]*"
)


def read_type(
    text: str, scope: Mapping[str, object], resolve: Resolve, of_call: Resolve | None = None
) -> TSType:
    """Return the type that a text describes.

    Args:
        scope: see ``tsfunc.types.parse``.
        resolve: returns the type of the object that a name refers to.
        of_call: the same for a descriptor; if given, the text is parsed as a descriptor.

    Raises:
        AnnotationError: the text is not a type, or not a descriptor.
    """
    return _Reader(text, scope, resolve, of_call).read()


class _Reader:
    """A text and the position up to which it has been parsed; see ``read_type``."""

    def __init__(
        self, text: str, scope: Mapping[str, object], resolve: Resolve, of_call: Resolve | None
    ) -> None:
        if not isinstance(text, str):
            raise AnnotationError(f"parse(text): expected a str, got {text!r}")
        self.text = text
        self.at = 0
        self.scope = scope
        self.resolve = resolve
        self.of_call = of_call
        self.what = "type" if of_call is None else "descriptor"

    def read(self) -> TSType:
        """Return the type of the whole text."""
        try:
            type_ = self.union()
        except RecursionError:
            text = f"{self.text[:40]!r}..."
            raise AnnotationError(f"{text}: nested too deeply for a {self.what}") from None
        if self.rest():
            raise self.error(f"expected the end of the {self.what}, got {self.rest()!r}")
        return type_

    # --- characters

    def rest(self) -> str:
        return self.text[self.at :].strip()

    def take(self, pattern: str | re.Pattern[str]) -> str | None:
        """Take the next characters if they match, and skip blanks before them.

        The result is None if they do not match.
        """
        match = re.compile(rf"\s*({getattr(pattern, 'pattern', pattern)})").match(
            self.text, self.at
        )
        if match is None:
            return None
        self.at = match.end()
        return match[1]

    def need(self, mark: str, what: str) -> None:
        if self.take(re.escape(mark)) is None:
            raise self.error(f"expected {mark!r} {what}, got {self.rest()[:20]!r}")

    def error(self, what: str) -> AnnotationError:
        return AnnotationError(f"{self.text!r} is not a valid {self.what}: {what}")

    # --- the grammar

    def union(self) -> TSType:
        members = [self.term()]
        while self.take(r"\|"):
            members.append(self.term())
        with self.faults_here():
            return self.unite(members)

    def unite(self, members: Sequence[TSType]) -> TSType:
        if self.of_call is None:
            return union_of(members)
        return members[0] if len(members) == 1 else TSUnion(tuple(members))

    def term(self) -> TSType:
        call = None if self.of_call is None else self.call_term()
        if call is not None:
            return call
        name = self.take(NAME)
        if name is None:
            raise self.error(f"expected a {self.what}, got {self.rest()[:20] or 'the end'!r}")
        if name in TENSOR_KINDS and self.take(r"\["):
            return TSTensor(meta=self.tensor(name))
        name = name.removeprefix("typing.").removeprefix("typing_extensions.")
        if name == "namedtuple":
            return self.named_tuple()
        if (name in GENERIC or name in _OTHERS) and name not in self.scope:
            return self.bracketed_type(name)
        return self.named(name)

    def named(self, name: str) -> TSType:
        word = None if name in self.scope else WORDS.get(name)
        if word is not None:
            return FLOAT if word == DOUBLE and self.of_call is not None else word
        value = self.look_up(name)
        if self.of_call is None:
            return self.resolve(value)
        if isinstance(value, type) and self.take(r"\("):
            return self.container(value)
        return self.of_call(value)

    def look_up(self, name: str) -> Any:
        value = find_object(name, self.scope)
        if value is None:
            raise self.error(
                f"{name} is neither a word of the grammar nor a class that can be found; give the "
                f"class in the scope: parse(text, {{{name.split('.')[0]!r}: ...}})"
            )
        return value

    def bracketed_type(self, name: str) -> TSType:
        if self.take(r"\[") is None:
            raise self.error(f"{name} needs the types of its elements: write {name}[...]")
        cls = GENERIC.get(name)
        if self.of_call is not None and cls is not None and cls.language_only:
            return self.of_types(name)
        if self.of_call is not None and cls is TSTuple:
            return self.tuple_of()
        items = self.items("]")
        if name == "Annotated":
            base, meta = items if len(items) == 2 else (ANY, ANY)
            if not isinstance(base, TSTensor) or not isinstance(meta, TSTensor):
                raise self.error("Annotated has a tensor class and a description: f32[n, 64]")
            return TSTensor(base.cls, meta.meta)
        with self.faults_here():
            return self.compose(name, items)

    def compose(self, name: str, items: Sequence[TSType]) -> TSType:
        if self.of_call is None:
            return compose(name, items)
        if name == "Union" and items:
            return self.unite(items)
        cls = GENERIC.get(name)
        if cls is TSOptional and len(items) == 1:
            return TSUnion((items[0], NONE))
        if cls is TSDict and len(items) == 2:
            return TSDict(*items)  # descriptors allow keys of more types
        if cls is None or cls in (TSOptional, TSDict) or len(items) != 1:
            raise AnnotationError(f"{name}[...] of {len(items)} descriptor(s) is not a descriptor")
        return cls.compose(name, items)

    def of_types(self, name: str) -> TSType:
        """Parse the content of the brackets as types of the language."""
        of_call, self.of_call = self.of_call, None
        try:
            with self.faults_here():
                return compose(name, self.items("]"))
        finally:
            self.of_call = of_call

    def items(self, end: str) -> list[TSType]:
        """Return the types up to the closing mark; ``()`` stands for no types."""
        if self.take(r"\(\s*\)"):
            self.need(end, "after ()")
            return []
        items = [self.union()]
        while self.take(","):
            if self.take(re.escape(end)):
                return items
            items.append(self.union())
        self.need(end, "or ','")
        return items

    def named_tuple(self) -> TSType:
        self.need("(", "after namedtuple")
        names: list[str] = []
        elements: list[TSType] = []
        while self.take(r"\)") is None:
            if elements:
                self.need(",", "or ')'")
                if self.take(r"\)"):
                    break
            name = self.take(r"[^\W\d]\w*(?=\s*:)")
            if name is not None:
                self.need(":", "after the name")
            # The name that namedtuple(..., rename=True) gives a field without a name.
            names.append(name or f"_{len(names)}")
            elements.append(self.union())
        with self.faults_here():
            return TSNamedTuple(tuple(names), tuple(elements))

    @contextlib.contextmanager
    def faults_here(self) -> Iterator[None]:
        """Add the text to errors of the types made from it."""
        try:
            yield
        except AnnotationError as error:
            raise self.error(str(error)) from None

    # --- terms of descriptors

    def call_term(self) -> TSType | None:
        """Return a term that only descriptors have; None if the next term is another."""
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
        return None

    def literal(self) -> Any:
        text = self.take(_LITERAL)
        if text is not None:
            return _parse_literal(text)
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
    ) -> tuple[tuple[Any, ...], tuple[TSType, ...]]:
        """Return the entries and children up to a closing mark."""
        entries: list[Any] = []
        children: list[TSType] = []
        while self.take(re.escape(end)) is None:
            if entries:
                self.need(",", f"or {end!r}")
            entries.append(entry())
            self.need(":", "after the key")
            children.append(self.union())
        return tuple(entries), tuple(children)

    def container(self, cls: type) -> TSType:
        """After ``module.Class(``: parse attributes, or the entries of a container."""
        entries, children = self.pairs(")", self.entry)
        if entries and all(isinstance(entry, Attribute) for entry in entries):
            return TSFields(cls, tuple(map(str, entries)), children)
        names = names_of_class(cls)
        if names is None:
            return TSPytree(cls, entries, children)
        if entries != names:
            raise self.error(
                f"{cls.__name__}: expected its fields {list(names)}, got {list(entries)}"
            )
        return TSPytree(cls, tuple(range(len(names))), children)

    def entry(self) -> Any:
        attribute = self.take(r"\.[^\W\d]\w*")
        if attribute is not None:
            return Attribute(attribute[1:])
        return self.take(r"[^\W\d]\w*(?=\s*:)") or self.literal()

    def tuple_of(self) -> TSType:
        """After ``Tuple[``: parse a tuple of any length, or of given elements."""
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

    # --- tensors

    def tensor(self, name: str) -> MetaTensorType:
        """After ``f32[``: parse the dims and the words of a tensor."""
        dims = self.take(r"[^\[\]]*") or ""
        self.need("]", "after the dims")
        words = list(iter(lambda: self.take(TENSOR_WORD), None))
        try:
            return MetaTensorType(**tensor_fields(name, dims, words))
        except DescriptorError as error:
            raise self.error(str(error)) from None


def _parse_literal(text: str) -> Any:
    sign = -1 if text.startswith("-") else 1
    if text.lstrip("+-") in ("inf", "nan"):
        return sign * (math.inf if text.endswith("inf") else math.nan)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise AnnotationError(f"expected a value, got {text!r}") from None


# --- composing, for annotations too


def union_of(members: Sequence[TSType]) -> TSType:
    """Return the type of a union of one type, or of one type and None.

    Raises:
        AnnotationError: it has two types.
    """
    rest = list(dict.fromkeys(member for member in members if member != NONE))
    if ANY in rest:
        return ANY
    if len(rest) > 1:
        raise AnnotationError(
            f"a union of {' and '.join(map(str, rest))}: the language has no unions but with "
            f"None (Optional[X]); write Any, or one of the types"
        )
    if not rest:
        return NONE
    return optional(rest[0]) if NONE in members else rest[0]


def compose(name: str, items: Sequence[TSType]) -> TSType:
    """Return a structural type, given the name of its constructor."""
    return union_of(items) if name == "Union" else GENERIC[name].compose(name, items)
