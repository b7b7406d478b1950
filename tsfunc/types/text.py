"""Types as text: reads what ``str`` of a type wrote, and what people write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.errors import AnnotationError
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
    is_key_type,
    key_error,
    optional,
)
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.reader import TENSOR_NAMES, Reader

WORDS: dict[str, TSType] = {
    **{type_.name: type_ for type_ in PRIMITIVES},
    **dict.fromkeys(TENSOR_NAMES, TENSOR),
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


def read_type(text: str, scope: Mapping[str, object], resolve: Callable[[Any], TSType]) -> TSType:
    """The type that a text says.

    Args:
        scope: see `tsfunc.types.parse`.
        resolve: what the object that a name was found to be means as a type.
    """
    return TypeReader(text, scope, resolve).read()


class TypeReader(Reader[TSType]):
    def __init__(
        self, text: str, scope: Mapping[str, object], resolve: Callable[[Any], TSType]
    ) -> None:
        super().__init__(text, scope)
        self._resolve = resolve

    def word(self, name: str) -> TSType | None:
        return WORDS.get(name)

    def resolve(self, found: Any) -> TSType:
        return self._resolve(found)

    def described(self, meta: MetaTensorType) -> TSType:
        return TSTensor(meta=meta)

    def unite(self, members: Sequence[TSType]) -> TSType:
        return union_of(members)

    def compose(self, name: str, items: Sequence[TSType]) -> TSType:
        return compose(name, items)

    def fields(self, names: tuple[str, ...], elements: tuple[TSType, ...]) -> TSType:
        return TSNamedTuple(names, elements)

    def annotated(self, base: TSType, more: TSType) -> TSType | None:
        if isinstance(base, TSTensor) and isinstance(more, TSTensor):
            return TSTensor(base.cls, more.meta)
        return None


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
        if not is_key_type(items[0]):
            raise key_error(items[0], items[1])
        return TSDict(items[0], items[1])
    if len(items) != 1:
        raise AnnotationError(f"{name} has one type, got {len(items)}")
    return _SINGLE[name](items[0])
