"""Assignments of a traced function, which its program repeats at every call.

NOTE [updates]
A function may assign to objects, variables and containers that outlive the call. Such an
assignment takes effect during the trace, so later reads in the trace see the new value. After the
trace all old values are restored, and the program ends with the same assignments: a value without
tensors is a constant of the program, and a tensor is one of its results. A value that is read
before it is assigned is guarded like any value that is read. A function that counts its calls in
Python is therefore retraced for each count. A tensor that each call replaces is an input, so the
guard checks its type and sizes and not its identity.

The state of a module follows the rules of ``torch.export``: buffers, and attributes without
tensors, can be assigned. A parameter, a submodule, or an attribute with a tensor that is not a
buffer can't be assigned.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tsfunc.types.values import same_value


@dataclass(frozen=True)
class Slot:
    """Stand-in for a tensor in the value of an update: its index among the updates' tensors."""

    index: int


@dataclass(frozen=True)
class OutsideRef:
    """Stand-in for an object from outside in a value that a program returns or assigns.

    Each call replaces it with its own object.

    Attributes:
        index: the index of the object in the list that the program is called with.
    """

    index: int


@dataclass(frozen=True)
class Update:
    """An assignment that a program ends with.

    Attributes:
        text: the user's spelling of the target.
        owner: the owner of the target, by its index in the list that the program is called with.
        target: the Python expression of the target, with ``{}`` for the owner.
        value: lists, tuples and dicts of constants, with a ``Slot`` for each tensor.
        fills: whether the owner is a container whose elements are all replaced.
        deletes: whether the target is deleted.
        buffer: the name of the assigned buffer if the owner is a module.
        keeps: whether the guards on the target's value, except on its tensors, still hold after
            the assignment.
    """

    text: str
    owner: int
    target: str
    value: Any = None
    fills: bool = False
    deletes: bool = False
    buffer: str | None = None
    keeps: bool = True

    def current(self, owner: Any) -> Any:
        """Return the current value of the target; None if the target does not exist."""
        try:
            return eval(self.target.format("owner"), {"owner": owner})
        except (AttributeError, LookupError, ValueError):
            return None

    def slots(self) -> list[Slot]:
        """Return the places of the tensors in its value."""
        return list(_slots(self.value))

    def statements(self, owner: str, spell: Callable[[Any], str]) -> list[str]:
        """Return the update as Python statements.

        Args:
            owner: the Python expression of the owner.
            spell: returns the Python expression of a value.
        """
        target = self.target.format(owner)
        if self.deletes:
            return [f"del {target}"]
        if not self.fills:
            return [f"{target} = {spell(self.value)}"]
        filled = [f"{target}.clear()"]
        if self.value:
            adds = "extend" if isinstance(self.value, list) else "update"
            filled.append(f"{target}.{adds}({spell(self.value)})")
        return filled


def _slots(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    else:
        for item in _elements(value):
            yield from _slots(item)


def fill(value: Any, tensors: Sequence[Any]) -> Any:
    """Return the value of an update with tensors, or other values, in its slots."""
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        filled = {key: fill(item, tensors) for key, item in value.items()}
        return defaultdict(value.default_factory, filled) if type(value) is defaultdict else filled
    if type(value) in (list, tuple, deque):
        return type(value)(fill(item, tensors) for item in value)
    return value


def same_updates(some: tuple[Update, ...], others: tuple[Update, ...]) -> bool:
    """Return True if two programs end with the same assignments, apart from their tensors."""
    return len(some) == len(others) and all(
        (a.text, a.owner, a.target, a.fills, a.deletes)
        == (b.text, b.owner, b.target, b.fills, b.deletes)
        and same_value(a.value, b.value)
        for a, b in zip(some, others, strict=True)
    )


class NotKept(Exception):
    """A value that a program can't make anew at every call; the message describes the value."""


class UpdateValues:
    """The values of a program's updates, and the tensors among them.

    Args:
        known: returns the stand-in for an object from outside, or None for another object.
    """

    def __init__(self, known: Callable[[Any], Any]) -> None:
        self.tensors: list[Any] = []
        self._known = known

    def kept(self, value: Any) -> Any:
        """Return a value in the form that an update stores.

        Raises:
            NotKept: the traced function made the value, and its type can't be copied.
        """
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat):
            self.tensors.append(value)
            return Slot(len(self.tensors) - 1)
        if isinstance(value, PLAIN):
            return value
        cls = type(value)
        if cls in (list, deque):
            return cls(self.kept(item) for item in value)
        if cls is tuple:
            return tuple([self.kept(item) for item in value])
        if cls is dict:
            return {key: self.kept(item) for key, item in value.items()}
        if cls is defaultdict and isinstance(value.default_factory, _FACTORIES):
            items = {key: self.kept(item) for key, item in value.items()}
            return defaultdict(value.default_factory, items)
        if cls in (set, frozenset) and all(map(_is_plain, value)):
            return copy.copy(value)
        again = value if isinstance(value, _SHARED) else self._known(value)
        if again is not None:
            return again
        raise NotKept(f"a {cls.__name__} that the function has made")


def _is_plain(value: Any) -> bool:
    """Return True for a number, string or the like, and for a tuple or frozenset of these."""
    inside = type(value) in (tuple, frozenset)
    return all(map(_is_plain, value)) if inside else isinstance(value, PLAIN)


def replaced(before: Any, after: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an assignment replaces by other tensors."""
    if isinstance(before, torch.Tensor):
        if isinstance(after, torch.Tensor) and after is not before:
            yield before
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            yield from replaced(before[key], after[key])
    elif isinstance(before, list | tuple | deque) and isinstance(after, list | tuple | deque):
        for some, other in zip(before, after, strict=False):
            yield from replaced(some, other)


def unchanged(before: Any, after: Any) -> bool:
    """Return True if two values differ at most in their tensors."""
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if isinstance(before, dict) and isinstance(after, dict):
        return list(before) == list(after) and all(unchanged(before[k], after[k]) for k in before)
    if isinstance(before, list | tuple | deque) and isinstance(after, list | tuple | deque):
        return len(before) == len(after) and all(map(unchanged, before, after))
    return same_value(before, after)


PLAIN = (
    int, float, bool, str, bytes, complex, type(None), enum.Enum, torch.dtype, torch.layout,
    torch.memory_format, torch.device, torch.Size, range,
)  # fmt: skip
_FACTORIES = (type, types.FunctionType, types.BuiltinFunctionType, type(None))
_SHARED = (type, types.ModuleType, types.BuiltinFunctionType)


def has_tensor(value: Any) -> bool:
    """Return True if a value is a tensor or a container with a tensor in it."""
    if isinstance(value, torch.Tensor):
        return True
    return any(has_tensor(item) for item in _elements(value))


def _elements(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from value


class Updates(NamedTuple):
    """The updates of a program, and the tensors (and symbolic numbers) among their values."""

    updates: tuple[Update, ...] = ()
    tensors: tuple[Any, ...] = ()
