"""The text of types and descriptors: the reader that is common to both.

    type     = term ("|" term)*                       of unions, those with None
    term     = NAME | NAME "[" type ("," type)* "]"   Any int List[X] Dict[K, V] Optional[X]
             | "namedtuple" "(" field ("," field)* ")"
             | tensor                                 f32[n, 64] cpu
    field    = [NAME ":"] type
    tensor   = DTYPE "[" dims "]" words               words: cpu requires_grad strided

A name that the grammar doesn't have is a class: see `tsfunc.types.class_names`. What is made of
all this is the business of the classes derived from `Reader`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.class_names import NAME, find
from tsfunc.types.dims import Dim
from tsfunc.types.meta import SHORT_DTYPES, MetaTensorType

N = TypeVar("N")

TENSOR_NAMES = ("Tensor", "TensorType", "torch.Tensor", "torch.tensor")
_COMPOSED = (
    "List", "list", "Optional", "Future", "torch.futures.Future", "torch.jit.Future", "RRef",
    "torch.distributed.rpc.RRef", "Tuple", "tuple", "Dict", "dict", "Union", "Annotated",
)  # fmt: skip

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
_MEMORY_FORMATS = {
    str(each).removeprefix("torch."): each
    for each in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
}
_TENSOR_WORD = re.compile(r"strides\[[^\[\]]*\]|[a-z_]\w*(?::\d+)?")
_BOUNDED = re.compile(r"(?:(\d+)\s*<=)?\s*([^\W\d]\w*)\s*(?:([<>])=\s*(\d+))?")
_STEPPED = re.compile(r"([^\W\d]\w*)\s*%\s*(\d+)\s*==\s*0")
_CHOSEN = re.compile(r"([^\W\d]\w*)\s+in\s*\{([\d\s,]*)\}")


class Reader(abc.ABC, Generic[N]):
    """A text, and how far it has been read.

    Args:
        text: what is read.
        scope: what the names of classes in it stand for, where it is not their own names.
    """

    what = "type"

    def __init__(self, text: str, scope: Mapping[str, object]) -> None:
        if not isinstance(text, str):
            raise AnnotationError(f"parse(text): expected a str, got {text!r}")
        self.text = text
        self.at = 0
        self.scope = scope

    def read(self) -> N:
        """What the whole text says."""
        try:
            found = self.union()
        except RecursionError:
            text = f"{self.text[:40]!r}..."
            raise AnnotationError(f"{text}: nested too deeply for a {self.what}") from None
        if self.rest():
            raise self.error(f"expected the end of the {self.what}, got {self.rest()!r}")
        return found

    # --- what is made of it

    @abc.abstractmethod
    def word(self, name: str) -> N | None:
        """A name that is a word of the grammar."""

    @abc.abstractmethod
    def resolve(self, found: Any) -> N:
        """What a name was found to be."""

    @abc.abstractmethod
    def described(self, meta: MetaTensorType) -> N: ...

    @abc.abstractmethod
    def unite(self, members: Sequence[N]) -> N: ...

    @abc.abstractmethod
    def compose(self, name: str, items: Sequence[N]) -> N: ...

    @abc.abstractmethod
    def fields(self, names: tuple[str, ...], elements: tuple[N, ...]) -> N:
        """A named tuple."""

    @abc.abstractmethod
    def annotated(self, base: N, more: N) -> N | None:
        """A tensor class and a description of its tensors; None where they are something else."""

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
        return AnnotationError(f"{self.text!r} is no {self.what}: {what}")

    # --- the grammar

    def union(self) -> N:
        members = [self.term()]
        while self.take(r"\|"):
            members.append(self.term())
        with self.faults_here():
            return self.unite(members)

    def term(self) -> N:
        name = self.take(NAME)
        if name is None:
            raise self.error(f"expected a {self.what}, got {self.rest()[:20] or 'the end'!r}")
        if (name in _DTYPES or name == "tensor") and self.take(r"\["):
            return self.described(self.tensor(name))
        name = name.removeprefix("typing.").removeprefix("typing_extensions.")
        if name == "namedtuple":
            return self.named_tuple()
        if name in _COMPOSED and name not in self.scope:
            return self.composed(name)
        return self.named(name)

    def named(self, name: str) -> N:
        word = None if name in self.scope else self.word(name)
        return self.resolve(self.look_up(name)) if word is None else word

    def look_up(self, name: str) -> Any:
        found = find(name, self.scope)
        if found is None:
            raise self.error(
                f"{name} is neither a word of the grammar nor a class that can be found; give the "
                f"class in the scope: parse(text, {{{name.split('.')[0]!r}: ...}})"
            )
        return found

    def composed(self, name: str) -> N:
        if self.take(r"\[") is None:
            raise self.error(f"{name} says not what is in it: write {name}[...]")
        items = self.items("]")
        if name == "Annotated":
            found = self.annotated(*items) if len(items) == 2 else None
            if found is None:
                raise self.error("Annotated has a tensor class and a description: f32[n, 64]")
            return found
        with self.faults_here():
            return self.compose(name, items)

    def items(self, end: str) -> list[N]:
        """What stands up to the closing mark; ``()`` alone is nothing."""
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

    def named_tuple(self) -> N:
        self.need("(", "after namedtuple")
        names: list[str] = []
        elements: list[N] = []
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
        with self.faults_here():
            return self.fields(tuple(names), tuple(elements))

    @contextlib.contextmanager
    def faults_here(self) -> Iterator[None]:
        """Faults of what is made of the text are said to be in this text."""
        try:
            yield
        except AnnotationError as error:
            raise self.error(str(error)) from None

    # --- tensors

    def tensor(self, name: str) -> MetaTensorType:
        """After ``f32[``."""
        dims = self.take(r"[^\[\]]*")
        self.need("]", "after the dims")
        known: dict[str, Any] = {"dtype": _DTYPES.get(name)}
        try:
            if dims is not None and dims.strip() != "...":
                known["shape"] = [_dim(dim.strip()) for dim in _split(dims)]
            while (word := self.take(_TENSOR_WORD)) is not None:
                _add_word(word, known)
            return MetaTensorType(**known)
        except DescriptorError as error:
            raise self.error(str(error)) from None


def _split(dims: str) -> list[str]:
    """The dims of a shape; a comma inside of braces is no end of one."""
    return re.split(r",(?![^{]*\})", dims) if dims.strip() else []


def _dim(text: str) -> Any:
    if text in ("?", "..."):
        return None if text == "?" else ...
    if text.isdecimal():
        return int(text)
    said = [_said_of_dim(part.strip()) for part in text.split(" and ")]
    if len(said) == 1 and said[0] is None:
        return text  # a name or an expression, or neither
    dims = [dim for dim in said if dim is not None]
    if len(dims) < len(said) or len({dim.name for dim in dims}) > 1:
        raise DescriptorError(f"{text!r} says nothing that can be said of one named size")
    return functools.reduce(Dim.meet, dims)


def _said_of_dim(text: str) -> Dim | None:
    """``n``, ``2<=n<=8``, ``n % 4 == 0`` or ``n in {2, 4}``; None for anything else."""
    stepped, chosen = _STEPPED.fullmatch(text), _CHOSEN.fullmatch(text)
    if stepped is not None:
        return Dim(stepped[1], multiple_of=int(stepped[2]))
    if chosen is not None:
        return Dim(chosen[1], one_of=tuple(int(size) for size in _split(chosen[2])))
    bounded = _BOUNDED.fullmatch(text)
    if bounded is None:
        return None
    low, name, sign, limit = bounded.groups()
    least = limit if sign == ">" else low
    most = limit if sign == "<" else None
    return Dim(name, None if least is None else int(least), None if most is None else int(most))


def _add_word(word: str, known: dict[str, Any]) -> None:
    """A word after the dims: whether it requires grad, a layout, a memory format, or a device."""
    key: str
    value: object
    if word in ("requires_grad", "no_grad"):
        key, value = "requires_grad", word == "requires_grad"
    elif word in _LAYOUTS:
        key, value = "layout", _LAYOUTS[word]
    elif word in _MEMORY_FORMATS:
        key, value = "memory_format", _MEMORY_FORMATS[word]
    elif word.startswith("strides["):
        strides = word.removeprefix("strides[").removesuffix("]")
        key, value = "strides", [_dim(each.strip()) for each in _split(strides)]
    else:
        key, value = "device", word
    if key in known:
        raise DescriptorError(f"{word} is the second {key} of one tensor")
    known[key] = value
