"""Which tensors came into being inside of an active level; asked only where one is written to.

NOTE [born inside]
A plain tensor does not say whether the transformed function made it or found it outside, and no
call of torch's that makes one is watched, since plain tensors are to be as fast as torch's. But
Python's collector keeps the objects that it tracks in the order of their births, and a level is
such an object: in the youngest generation, what stands after the level was born inside of it.
A collection moves all that is there to an older generation and loses the order. So while levels
are active each collection first has its tensors noted here, each with the number of levels that
were born before it.

What is not found is taken for born outside, and is refused where it is written to. A tensor whose
Python object is younger than itself would be taken for born inside: ``writes`` looks for whatever
else may hold it. The order is that of CPython's collector with a global lock; without one nothing
counts as born inside.

Public names only: ``gc.get_objects``, ``gc.callbacks``. ``tests/bridge/test_births.py`` fails
clearly where the order does not hold.
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
    """What collections have moved out of the youngest generation while levels were active."""

    def __init__(self) -> None:
        self.levels = 0  # how many have been met
        self.noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # Those that stand for older ones: the outermost level that they count as outside of.
        self.older: dict[int, tuple[weakref.ref[torch.Tensor], TracerLevel]] = {}


_births: Final = _Births()


def _before_collection(phase: str, info: Mapping[str, Any]) -> None:
    """Notes the tensors of the youngest generation, and in which level each was born.

    An id that is used again needs no care: its new tensor is young, or is noted in its turn.
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
    """The first level is active already, and may have been moved."""
    for level in tuple(active_levels):
        if isinstance(level, TracerLevel):
            level.born = _births.levels = 1
    gc.callbacks.append(_before_collection)


def born_inside(level: TracerLevel) -> dict[int, torch.Tensor]:
    """The tensors, by id, that were made since the level was and are still there."""
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
    """A tensor stands for an older one from now on, in the values of a level.

    In levels inside of that one which the older was not born in, it was not either.
    """
    active = tuple(active_levels)
    inner = [d for d in active if isinstance(d, TracerLevel) and level in d.outer.levels]
    without = [d for d in inner if id(old) not in born_inside(d)]
    if without:
        outermost = min(without, key=lambda d: d.depth)
        _births.older[id(new)] = weakref.ref(new), outermost
