"""The state of the check of one call.

NOTE [one check, one report]
A check does not stop at the first mismatch. It adds mismatches to the `CheckContext` that it is
given, so that one error lists all of them. Text is made only for mismatches, so a call that fits
costs only the comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tsfunc.types.descriptors import children_of
from tsfunc.types.dims import DimExpr
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.values import Attribute, entry_text

Path: TypeAlias = tuple[Any, ...]
"""The path of a value: the name of the parameter, then optree's entries down to the leaf."""


class Failure(NamedTuple):
    """One mismatch: its line, and its depth, which selects the closest alternative of a union."""

    depth: tuple[int, bool]
    line: str


class CheckContext:
    """The mismatches and the named sizes that the check of one call has found so far."""

    __slots__ = ("arguments", "failures", "leaves", "pending", "places", "sizes")

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.arguments = arguments
        self.sizes: dict[str, int] = {}
        self.places: dict[str, tuple[Path, str]] = {}
        self.leaves: dict[Path, MetaTensorType] = {}
        self.pending: list[tuple[Path, str, DimExpr, int]] = []
        self.failures: list[Failure] = []

    def fail(self, path: Path, part: str, what: str) -> None:
        """Add a mismatch of the value at `path`, in its attribute or item `part`."""
        line = f"{place_text(path, self.arguments)}{part}: {what}"
        self.failures.append(Failure((len(path), bool(part)), line))

    def bound_at(self, name: str) -> str:
        """Return a text with the place that bound a named dim."""
        path, part = self.places[name]
        return f"{name} is {self.sizes[name]} at {place_text(path, self.arguments)}{part}"

    def fork(self) -> CheckContext:
        """Return a context with the same state, for an alternative that may not fit."""
        context = CheckContext(self.arguments)
        context.sizes.update(self.sizes)
        context.places.update(self.places)
        context.leaves.update(self.leaves)
        context.pending.extend(self.pending)
        return context

    def adopt(self, other: CheckContext) -> None:
        """Take over the state of a fork of this context, without its failures."""
        self.sizes, self.places = other.sizes, other.places
        self.leaves, self.pending = other.leaves, other.pending


Check: TypeAlias = Callable[[Any, Path, CheckContext], None]


def place_text(path: Path, arguments: Mapping[str, object]) -> str:
    """Return a path in Python's notation: ``params['w'][0]``, ``state.step``."""
    text, value = str(path[0]), arguments.get(path[0])
    for entry in path[1:]:
        text += entry_text(type(value), entry)
        value = _child(value, entry)
    return text


def _child(value: object, entry: object) -> object:
    """Return the child, or None, after which a path is shown by its entries only."""
    if isinstance(entry, Attribute):
        return getattr(value, entry.name, None)
    try:
        entries, children = children_of(value)
        return children[entries.index(entry)]
    except ValueError:
        return None
