"""Finds the tensors that were born inside an active level; runs only when a write needs it.

NOTE [born inside]
A plain tensor does not record whether the transformed function made it or found it outside. The
torch calls that make tensors are not watched, because plain tensors must stay as fast as torch's.
But Python's garbage collector keeps its tracked objects in the order of their births, and a level
is such an object: in the youngest generation, the objects after the level were born inside it. A
collection moves all young objects to an older generation and loses the order. Therefore, while
levels are active, a callback notes the young tensors before each collection, each with the number
of levels born before it.

A tensor that is not found counts as born outside, and a write to it is refused. A tensor whose
Python object is younger than its memory would wrongly count as born inside; ``writes`` therefore
looks for other holders of the memory. The order is a property of CPython's collector with a global
lock; on free-threaded builds no tensor counts as born inside.

The module uses only public names: ``gc.get_objects`` and ``gc.callbacks``.
``tests/bridge/test_births.py`` fails clearly if the order does not hold.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch

from tsfunc.bridge.tracers.factories import on_first_level
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch.state import active_levels

_IN_ORDER = "t" not in getattr(sys, "abiflags", "")


class _Births:
    """Tensors that collections moved out of the youngest generation while levels were active."""

    def __init__(self) -> None:
        self.levels = 0  # the number of levels met
        self.noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # Tensors that replace older tensors: the outermost level that they count as born outside
        # of.
        self.older: dict[int, tuple[weakref.ref[torch.Tensor], TracerLevel]] = {}


_births: Final = _Births()


def _before_collection(phase: str, info: Mapping[str, Any]) -> None:
    """Note the tensors of the youngest generation, each with the number of levels born before it.

    A reused id does no harm: its new tensor is young, or a later collection notes it.
    """
    if phase != "start":
        return
    if not active_levels:
        _births.noted.clear()
        _births.older.clear()
        return
    noted = _births.noted
    for item in gc.get_objects(generation=0):
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            noted[id(item)] = weakref.ref(item), _births.levels
        elif issubclass(kind, TracerLevel):
            _births.levels += 1
            item.born = _births.levels


@on_first_level
def _watch_collections() -> None:
    """Register the callback; the first level is there already, and may have left generation 0."""
    for item in gc.get_objects():
        if issubclass(type(item), TracerLevel):
            item.born = _births.levels = 1
    gc.callbacks.append(_before_collection)


def born_inside(level: TracerLevel) -> dict[int, torch.Tensor]:
    """Return the live tensors that were born after the level, by id."""
    found = _younger(level) if _IN_ORDER else {}
    for reference, outside in list(_births.older.values()):
        tensor = reference()
        if tensor is not None and (outside is level or outside in level.outer.levels):
            found.pop(id(tensor), None)
    return found


def _younger(level: TracerLevel) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for item in reversed(gc.get_objects(generation=0)):
        if item is level:
            return found
        if issubclass(type(item), torch.Tensor):
            found[id(item)] = item
    if level.born:
        for reference, born in list(_births.noted.values()):
            tensor = reference()
            if tensor is not None and born >= level.born:
                found[id(tensor)] = tensor
    return found


def take_place(old: torch.Tensor, new: torch.Tensor, level: TracerLevel) -> None:
    """Let a new tensor replace an older one among the values of a level.

    For each level inside ``level``, the new tensor counts as born outside if the old tensor was.
    """
    active = tuple(active_levels)
    inner = [d for d in active if isinstance(d, TracerLevel) and level in d.outer.levels]
    without = [d for d in inner if id(old) not in born_inside(d)]
    if without:
        outermost = min(without, key=lambda d: d.depth)
        _births.older[id(new)] = weakref.ref(new), outermost
