"""Descriptors as straight-line Python: whether a call keeps them, and the sizes of the names.

Nearly every call that is checked is right. So that question is answered first, by generated code
that gives up at the first mismatch; what is wrong, and where, is then said by `checks.py`. The code
may give up on a call that is right, but never takes one that is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tsfunc.types.conformance import decide
from tsfunc.types.descriptors import tensor_leaves
from tsfunc.types.dims import DimExpr
from tsfunc.types.generated import Source
from tsfunc.types.grammar import (
    ANY,
    Descriptor,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFields,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSPytree,
    TSRRef,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSUnion,
    Value,
    assert_never,
)
from tsfunc.types.values import same_keys, same_value

Quick = Callable[[Mapping[str, object]], "dict[str, int] | None"]


class _SlowError(Exception):
    """There is something among the descriptors that code is not generated for."""


def generate_check(
    descriptors: Mapping[str, Descriptor], signature: inspect.Signature
) -> Quick | None:
    """A function of a call's arguments: the sizes of named dims, or None where it can't tell.

    Args:
        descriptors: by parameter name.
        signature: the function's, which has the defaults.

    Returns:
        The function; None where descriptors are such that none is generated.
    """
    leaves = [meta for name, each in descriptors.items() for _, meta in tensor_leaves(each, name)]
    if any(isinstance(dim, DimExpr) for meta in leaves for dim in meta.sizes):
        return None  # an expression is worked out, or solved, when all of its names are known
    lines = _Lines()
    try:
        for name, each in descriptors.items():
            lines.argument(name, signature.parameters[name], each)
    except _SlowError:
        return None
    return lines.finish()


class _Lines(Source):
    """The lines so far; see `Source`. A call is refused by False, which no sizes are."""

    def __init__(self) -> None:
        super().__init__(decide, ("arguments",))

    def argument(self, name: str, parameter: inspect.Parameter, descriptor: Descriptor) -> None:
        default = parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            default = ()
        elif parameter.kind is parameter.VAR_KEYWORD:
            default = {}
        at = self.new()
        if default is parameter.empty:
            self.refuse(f"{name!r} not in arguments", "    ")
            self.lines.append(f"    {at} = arguments[{name!r}]")
        else:
            self.lines.append(f"    {at} = arguments.get({name!r}, {self.name_of(default)})")
        self.descriptor(at, descriptor, "    ")

    def name_of(self, value: object) -> str:
        """A name for an object, None among them."""
        return "None" if value is None else self.new(value)

    def finish(self) -> Quick:
        pairs = ", ".join(f"{name!r}: {variable}" for name, variable in self.sizes.items())
        fits = self.function("fits", "arguments", f"{{{pairs}}}")

        def quick(arguments: Mapping[str, object]) -> dict[str, int] | None:
            sizes: Any = fits(arguments)
            if sizes is False:
                return None
            if -1 in sizes.values():  # what would have given it a size did not come
                return {name: size for name, size in sizes.items() if size != -1}
            return dict(sizes)

        return quick if self.sizes else lambda arguments: None if fits(arguments) is False else {}

    def descriptor(self, at: str, descriptor: Descriptor, indent: str) -> None:
        """Lines that return False where the variable `at` does not keep the descriptor."""
        match descriptor:
            case TSMetaType():
                return
            case TSTensor() | TSPrimitiveType():
                self.emit(at, descriptor, indent)
            case TSBuiltinClass(cls) | TSCustomClass(cls) | TSEnum(cls) | TSFields(cls, names=()):
                self.refuse(self.no_instance(at, cls), indent)
            case Value(value):
                self.value(at, value, indent)
            case TSList(element):
                self.refuse(self.no_instance(at, list), indent)
                self.items(at, element, indent)
            case TSTupleOf(element):
                self.refuse(self.no_instance(at, tuple), indent)
                self.items(at, element, indent)
            case TSDict(key, item):
                self.refuse(self.no_instance(at, dict), indent)
                self.items(at, key, indent)
                self.items(f"{at}.values()", item, indent)
            case TSOptional(first) | TSUnion((first, TSPrimitiveType("None"))):
                self.lines.append(f"{indent}if {at} is not None:")
                self.descriptor(at, first, f"{indent}    ")
                self.lines.append(f"{indent}    pass")
            case TSTuple(children):
                self.refuse(self.no_instance(at, tuple), indent)
                self.children(at, tuple(range(len(children))), children, indent)
            case TSPytree(kind, entries, children) if kind in (list, dict):
                self.refuse(self.no_instance(at, kind), indent)
                if kind is dict and all(type(entry) is str for entry in entries) and entries:
                    keys = " or ".join(f"{entry!r} not in {at}" for entry in entries)
                    self.refuse(keys, indent)
                elif kind is dict and entries:
                    self.refuse(f"not {self.new(same_keys)}({self.new(entries)}, {at})", indent)
                self.children(at, entries, children, indent)
            case (
                TSUnion() | TSPytree() | TSNamedTuple() | TSFields() | TSFuture() | TSRRef()
                | TSModuleInterface()
            ):  # fmt: skip
                raise _SlowError
            case _:
                assert_never(descriptor)

    def children(
        self, at: str, entries: tuple[Any, ...], children: tuple[Descriptor, ...], indent: str
    ) -> None:
        """Lines for the children of a container that has just these entries."""
        self.refuse(f"{self.known[len]}({at}) != {len(children)}", indent)
        for entry, child in zip(entries, children, strict=True):
            if child != ANY:
                part = self.new()
                self.lines.append(f"{indent}{part} = {at}[{self.key(entry)}]")
                self.descriptor(part, child, indent)

    def key(self, entry: Any) -> str:
        return repr(entry) if type(entry) in (int, str) else self.name_of(entry)

    def items(self, over: str, element: Descriptor, indent: str) -> None:
        if element == ANY:
            return
        self.loops += 1
        self.lines.append(f"{indent}for {(item := self.new())} in {over}:")
        self.descriptor(item, element, f"{indent}    ")
        self.lines.append(f"{indent}    pass")
        self.loops -= 1

    def value(self, at: str, value: object, indent: str) -> None:
        if value is None or isinstance(value, bool):
            self.refuse(f"{at} is not {value}", indent)
        else:
            wanted, same = self.new(value), self.new(same_value)
            self.refuse(f"{at} is not {wanted} and not {same}({wanted}, {at})", indent)
