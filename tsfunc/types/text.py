"""Types as text: reads what ``str`` of a type wrote, and what people write.

    type     = term ("|" term)*                       of unions, those with None
    term     = NAME | NAME "[" type ("," type)* "]"   Any int List[X] Dict[K, V] Optional[X]
             | "namedtuple" "(" field ("," field)* ")"
             | tensor                                 f32[n, 64] cpu
    field    = [NAME ":"] type
    tensor   = DTYPE "[" dims "]" words               words: a device, requires_grad, a layout

A name that the grammar doesn't have is a class: see `tsfunc.types.class_names`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.class_names import NAME, find
from tsfunc.types.dims import Dim, DimSpec
from tsfunc.types.grammar import (
    ANY,
    NONE,
    PRIMITIVES,
    TENSOR,
    TSDict,
    TSFuture,
    TSList,
    TSNamedTuple,
    TSRRef,
    TSTensor,
    TSTuple,
    TSType,
    optional,
)
from tsfunc.types.meta import SHORT_DTYPES, MetaTensorType

Resolve: TypeAlias = Callable[[Any], TSType]
"""What the object that a name was found to be means as a type."""

_TENSOR_NAMES = ("Tensor", "TensorType", "torch.Tensor", "torch.tensor")
_WORDS: dict[str, TSType] = {
    **{type_.name: type_ for type_ in PRIMITIVES},
    **dict.fromkeys(_TENSOR_NAMES, TENSOR),
    "Any": ANY,
    "object": ANY,
    "NoneType": NONE,
}
_SINGLE: dict[str, Callable[[TSType], TSType]] = {
    "List": TSList,
    "list": TSList,
    "Optional": optional,
    "Future": TSFuture,
    "torch.futures.Future": TSFuture,
    "torch.jit.Future": TSFuture,
    "RRef": TSRRef,
    "torch.distributed.rpc.RRef": TSRRef,
}
_COMPOSED = (*_SINGLE, "Tuple", "tuple", "Dict", "dict", "Union", "Annotated")

_DTYPES = {short: dtype for dtype, short in SHORT_DTYPES.items()} | {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in SHORT_DTYPES
}
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout
    for layout in vars(torch).values()
    if isinstance(layout, torch.layout)
}
_BOUNDED = re.compile(r"(?:(\d+)\s*<=)?\s*([^\W\d]\w*)\s*(?:([<>])=\s*(\d+))?")


def read_type(text: str, scope: Mapping[str, object], resolve: Resolve) -> TSType:
    """The type that a text says; `tsfunc.types.parse`, for any meaning of what names stand for."""
    reader = _Reader(text, scope, resolve)
    try:
        found = reader.union()
    except RecursionError:
        raise AnnotationError(f"{text[:40]!r}...: nested too deeply for a type") from None
    if reader.rest():
        raise reader.error(f"expected the end of the type, got {reader.rest()!r}")
    return found


class _Reader:
    """A text, and how far it has been read."""

    def __init__(self, text: str, scope: Mapping[str, object], resolve: Resolve) -> None:
        self.text = text
        self.at = 0
        self.scope = scope
        self.resolve = resolve

    # --- characters

    def rest(self) -> str:
        return self.text[self.at :].strip()

    def take(self, pattern: str | re.Pattern[str]) -> str | None:
        """What stands next, if it matches; blanks before it are skipped."""
        found = re.compile(rf"\s*({getattr(pattern, 'pattern', pattern)})").match(
            self.text, self.at
        )
        if found is None:
            return None
        self.at = found.end()
        return found[1]

    def need(self, mark: str, what: str) -> None:
        if self.take(re.escape(mark)) is None:
            raise self.error(f"expected {mark!r} {what}, got {self.rest()[:20]!r}")

    def error(self, what: str) -> AnnotationError:
        return AnnotationError(f"{self.text!r} is no type: {what}")

    # --- the grammar

    def union(self) -> TSType:
        members = [self.term()]
        while self.take(r"\|"):
            members.append(self.term())
        try:
            return union_of(members)
        except AnnotationError as error:
            raise self.error(str(error)) from None

    def term(self) -> TSType:
        name = self.take(NAME)
        if name is None:
            raise self.error(f"expected a type, got {self.rest()[:20] or 'the end'!r}")
        if (name in _DTYPES or name == "tensor") and self.take(r"\["):
            return TSTensor(meta=self.tensor(name))
        name = name.removeprefix("typing.").removeprefix("typing_extensions.")
        if name == "namedtuple":
            return self.named_tuple()
        if name in _COMPOSED and name not in self.scope:
            return self.composed(name)
        return self.named(name)

    def named(self, name: str) -> TSType:
        if name not in self.scope and name in _WORDS:
            return _WORDS[name]
        found = find(name, self.scope)
        if found is None:
            raise self.error(
                f"{name} is neither a word of the grammar nor a class that can be found; give the "
                f"class in the scope: parse(text, {{{name.split('.')[0]!r}: ...}})"
            )
        return self.resolve(found)

    def composed(self, name: str) -> TSType:
        if self.take(r"\[") is None:
            raise self.error(f"{name} says not what is in it: write {name}[...]")
        if name == "Annotated":
            return self.annotated()
        items = self.items("]")
        try:
            return compose(name, items)
        except AnnotationError as error:
            raise self.error(str(error)) from None

    def items(self, end: str) -> list[TSType]:
        """Types up to the closing mark; ``()`` alone is none."""
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
            # What namedtuple(..., rename=True) calls a field that has no name.
            names.append(name or f"_{len(names)}")
            elements.append(self.union())
        try:
            return TSNamedTuple(tuple(names), tuple(elements))
        except AnnotationError as error:
            raise self.error(str(error)) from None

    def annotated(self) -> TSType:
        base = self.union()
        self.need(",", "after what is annotated")
        more = self.union()
        self.need("]", "after the description")
        if not isinstance(base, TSTensor) or not isinstance(more, TSTensor):
            raise self.error("Annotated has a tensor class and a description: f32[n, 64]")
        return TSTensor(base.cls, more.meta)

    # --- tensors

    def tensor(self, name: str) -> MetaTensorType:
        """After ``f32[``."""
        dims = self.take(r"[^\[\]]*")
        self.need("]", "after the dims")
        known: dict[str, Any] = {"dtype": _DTYPES.get(name)}
        try:
            if dims is not None and dims.strip() != "...":
                known["shape"] = [_dim(dim.strip()) for dim in _split(dims)]
            while (word := self.take(r"[a-z_]\w*(?::\d+)?")) is not None:
                _add_word(word, known)
            return MetaTensorType(**known)
        except DescriptorError as error:
            raise self.error(str(error)) from None


def _split(dims: str) -> list[str]:
    return dims.split(",") if dims.strip() else []


def _dim(text: str) -> DimSpec:
    if text == "?":
        return None
    if text.isdecimal():
        return int(text)
    bounded = _BOUNDED.fullmatch(text)
    if bounded is None:
        return text
    low, name, sign, limit = bounded.groups()
    least = limit if sign == ">" else low
    most = limit if sign == "<" else None
    return Dim(name, None if least is None else int(least), None if most is None else int(most))


def _add_word(word: str, known: dict[str, Any]) -> None:
    """A word after the dims: whether it requires grad, a layout, or a device."""
    key: str
    value: object
    if word in ("requires_grad", "no_grad"):
        key, value = "requires_grad", word == "requires_grad"
    elif word in _LAYOUTS:
        key, value = "layout", _LAYOUTS[word]
    else:
        key, value = "device", word
    if key in known:
        raise DescriptorError(f"{word} is the second {key} of one tensor")
    known[key] = value


def parse_tensor(text: str) -> MetaTensorType:
    """The description that ``str`` of a `MetaTensorType` wrote."""
    found = read_type(text, {}, lambda found: ANY)
    if not isinstance(found, TSTensor) or found.cls is not torch.Tensor:
        raise AnnotationError(f"{text!r} describes no tensor; write for example f32[n, 64] cpu")
    return found.meta


# --- composing, for annotations too


def union_of(members: Sequence[TSType]) -> TSType:
    """The type of a union: one type, or one type and None.

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
    """A structural type by the name of its constructor."""
    if name in ("Tuple", "tuple"):
        return TSTuple(tuple(items))
    if name == "Union":
        return union_of(items)
    if name in ("Dict", "dict"):
        if len(items) != 2:
            raise AnnotationError(f"{name} has a key and a value type, got {len(items)} type(s)")
        return TSDict(items[0], items[1])
    if len(items) != 1:
        raise AnnotationError(f"{name} has one type, got {len(items)}")
    return _SINGLE[name](items[0])
