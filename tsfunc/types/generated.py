"""Types as straight-line Python: a function that says whether values are of their types.

Most values are, and a call's arguments are checked at every call: so the question whether there is
a mismatch is answered by generated code, and only where there is one does `check` look for all of
them. The code may say no of a value that fits, never yes of one that does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tsfunc.types.annotation import attribute_types
from tsfunc.types.dims import Dim, DimExpr, DimForm
from tsfunc.types.grammar import (
    TSAllType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSModuleType,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSRRef,
    TSTensor,
    TSTuple,
    TSType,
    assert_never,
    children_of_type,
)
from tsfunc.types.inference import names_of_class, primitive_of
from tsfunc.types.meta import MetaTensorType, on_device

Fits = Callable[..., bool]


def generate(types: Sequence[TSAllType], decide: Callable[[TSAllType], Fits]) -> Fits:
    """A function of as many values as there are types, true only if each is of its type.

    Args:
        types: sizes of one name are equal within all of them.
        decide: gives a function for a type that generated code does not decide: a class with
            fields, an interface, a future.
    """
    if any(_leaves_names_open(type_) for type_ in types):
        return lambda *values: False
    source = _Source(decide)
    for i, type_ in enumerate(types):
        source.emit(f"p{i}", type_, "    ")
    names = ", ".join(f"p{i}" for i in range(len(types)))
    start = [f"    {variable} = -1" for variable in source.sizes.values()]
    text = "\n".join([f"def fits({names}):", *start, *source.lines, "    return True"])
    exec(compile(text, "<type check>", "exec"), source.scope)
    fits: Fits = source.scope["fits"]
    return fits


def _leaves_names_open(type_: TSAllType) -> bool:
    """Whether generated code can't hold the named sizes of a type against each other.

    It reads them one after the other: a computed size may come before its names, and what
    `decide` looks at does not say what it has read.
    """
    return any(
        isinstance(dim, DimExpr) or (behind and isinstance(dim, Dim))
        for dim, behind in _dims(type_, ())
    )


def _dims(type_: TSAllType, behind: tuple[type, ...]) -> Iterator[tuple[DimForm, bool]]:
    """The sizes in a type, each with whether it is behind a type that `decide` is asked about.

    `behind` are the classes around it, so that one that has itself for an attribute comes once.
    """
    match type_:
        case TSTensor(_, meta):
            for dim in meta.dims or ():
                yield dim, bool(behind)
        case TSCustomClass(cls):
            if dataclasses.is_dataclass(cls) and cls not in behind:
                for child in attribute_types(cls).values():
                    yield from _dims(child, (*behind, cls))
        case TSFuture(element) | TSRRef(element):
            yield from _dims(element, (*behind, type(type_)))
        case TSModuleType():
            return
        case _:
            for child in children_of_type(type_):
                yield from _dims(child, behind)


class _Source:
    """The lines so far, the objects that they name, and a variable for each named size."""

    def __init__(self, decide: Callable[[TSAllType], Fits]) -> None:
        self.decide = decide
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"Tensor": torch.Tensor, "names_of": _names_of}
        self.sizes: dict[str, str] = {}
        self._count = 0

    def new(self, value: object = None) -> str:
        """A new variable; for an object, a name of it."""
        self._count += 1
        name = f"v{self._count}"
        if value is not None:
            self.scope[name] = value
        return name

    def refuse(self, condition: str, indent: str) -> None:
        self.lines.append(f"{indent}if {condition}: return False")

    def emit(self, at: str, type_: TSAllType, indent: str) -> None:
        """Lines that return False where the variable `at` is not of the type."""
        match type_:
            case TSMetaType():
                return
            case TSPrimitiveType("None"):
                self.refuse(f"{at} is not None", indent)
            case TSPrimitiveType(name):
                kind = "float" if name == "double" else name
                other = self.new(functools.partial(_is_derived, kind))
                self.refuse(f"type({at}) is not {kind} and not {other}({at})", indent)
            case TSOptional(element):
                self.lines.append(f"{indent}if {at} is not None:")
                self.emit(at, element, indent + "    ")
                self.lines.append(f"{indent}    pass")
            case TSList(element):
                self.refuse(f"not isinstance({at}, list)", indent)
                item = self.new()
                self.loop(item, at, ((item, element),), indent)
            case TSDict(key_type, item_type):
                self.refuse(f"not isinstance({at}, dict)", indent)
                key, item = self.new(), self.new()
                pairs = ((key, key_type), (item, item_type))
                self.loop(f"{key}, {item}", f"{at}.items()", pairs, indent)
            case TSTuple(elements):
                self.refuse(f"not isinstance({at}, tuple) or len({at}) != {len(elements)}", indent)
                self.unpack(at, elements, indent)
            case TSNamedTuple(names, elements):
                self.refuse(f"names_of(type({at})) != {names!r}", indent)
                self.unpack(at, elements, indent)
            case TSTensor(cls, meta):
                self.tensor(at, "Tensor" if cls is torch.Tensor else self.new(cls), meta, indent)
            case TSBuiltinClass(cls) | TSEnum(cls):
                self.refuse(f"not isinstance({at}, {self.new(cls)})", indent)
            case TSCustomClass() | TSModuleInterface() | TSModuleType() | TSFuture() | TSRRef():
                self.refuse(f"not {self.new(self.decide(type_))}({at})", indent)
            case _:
                assert_never(type_)

    def loop(
        self, target: str, over: str, items: Iterable[tuple[str, TSType]], indent: str
    ) -> None:
        before = len(self.lines)
        self.lines.append(f"{indent}for {target} in {over}:")
        for item, type_ in items:
            self.emit(item, type_, indent + "    ")
        if len(self.lines) == before + 1:  # its items may be anything
            self.lines.pop()

    def unpack(self, at: str, elements: Sequence[TSType], indent: str) -> None:
        items = [self.new() for _ in elements]
        if items:
            self.lines.append(f"{indent}{', '.join(items)}, = {at}")
        for item, type_ in zip(items, elements, strict=True):
            self.emit(item, type_, indent)

    def tensor(self, at: str, cls: str, meta: MetaTensorType, indent: str) -> None:
        self.refuse(f"not isinstance({at}, {cls})", indent)
        if meta.dtype is not None:
            self.refuse(f"{at}.dtype is not {self.new(meta.dtype)}", indent)
        if meta.dims is not None:
            shape = self.new()
            self.lines.append(f"{indent}{shape} = {at}.shape")
            self.refuse(f"len({shape}) != {len(meta.dims)}", indent)
            for axis, dim in enumerate(meta.dims):
                self.size(f"{shape}[{axis}]", dim, indent)
        if meta.device is not None:
            near = self.new(functools.partial(_is_on, meta.device))
            self.refuse(
                f"{at}.device != {self.new(meta.device)} and not {near}({at}.device)", indent
            )
        if meta.requires_grad is not None:
            self.refuse(f"{at}.requires_grad is not {meta.requires_grad}", indent)
        if meta.layout is not None:
            self.refuse(f"{at}.layout is not {self.new(meta.layout)}", indent)

    def size(self, at: str, dim: DimForm, indent: str) -> None:
        if isinstance(dim, int):
            self.refuse(f"{at} != {dim}", indent)
        elif isinstance(dim, Dim):
            variable = self.sizes.setdefault(dim.name, f"size{len(self.sizes)}")
            if dim.min is not None:
                self.refuse(f"{at} < {dim.min}", indent)
            if dim.max is not None:
                self.refuse(f"{at} > {dim.max}", indent)
            self.lines.append(f"{indent}if {variable} == -1: {variable} = {at}")
            self.lines.append(f"{indent}elif {variable} != {at}: return False")


def _is_derived(kind: str, value: object) -> bool:
    """Whether a value of a class derived from int, float or str counts as one."""
    own = primitive_of(value)
    return own is not None and own.name == kind


def _is_on(promised: torch.device, came: torch.device) -> bool:
    return on_device(came, promised)


@functools.lru_cache(maxsize=1024)
def _names_of(cls: type) -> tuple[str, ...] | None:
    return names_of_class(cls)
