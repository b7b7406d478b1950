"""Finds the tensors that were created inside an active level; runs only when a write needs it.

NOTE [created inside]
A plain tensor does not record whether the transformed function made it or found it outside. The
torch calls that make tensors are not watched, because plain tensors must stay as fast as torch's.
But Python's garbage collector keeps its tracked objects in the order of their creation, and a level
is such an object: in the youngest generation, the objects after the level were created inside it. A
collection moves all young objects to an older generation and loses the order. Therefore, while
levels are active, a callback notes the young tensors before each collection, each with the number
of earlier levels.

A tensor that is not found counts as created outside, and a write to it is refused. A tensor whose
Python object is younger than its memory would wrongly count as created inside; ``writes`` therefore
looks for other holders of the memory. The order is a property of CPython's collector with a global
lock; on free-threaded builds no tensor counts as created inside.

The module uses only public names: ``gc.get_objects`` and ``gc.callbacks``.
``tests/bridge/test_creation_tracking.py`` fails clearly if the order does not hold.

NOTE [half-made tuples]
``gc.get_objects`` also returns the objects that other threads are making, such as the tuple of
``tuple(generator)``. CPython extends such a tuple in place, and raises a SystemError in that thread
if anything else refers to the tuple. The objects are therefore chosen by iterators in C, in one
call: no other thread runs before the references to all other objects are gone. A collection would
run Python code in between, so it is put off.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Mapping
from itertools import chain, compress, repeat, starmap
from typing import Any, Final

import torch

from tsfunc.bridge.tracers.registrations import on_first_level
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch.state import active_levels

# --- the live objects of some classes


_lock = threading.RLock()


def live_objects(kinds: tuple[type, ...], generation: int | None = None) -> list[Any]:
    """Return the tracked objects of the classes and their subclasses, in the collector's order.

    Args:
        kinds: classes whose metaclasses do not define ``__subclasscheck__`` in Python.
        generation: the generation of the collector to look in; None for all.
    """
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return live_objects_in_collection(kinds, generation)
        finally:
            if enabled:
                gc.enable()


def live_objects_in_collection(kinds: tuple[type, ...], generation: int | None = None) -> list[Any]:
    """Return the same as :func:`live_objects`, inside of a callback of the collector."""
    found: list[Any] = []
    for each in range(len(gc.get_count())) if generation is None else (generation,):
        found.extend(_chosen(kinds, each))
    return found


def _chosen(kinds: tuple[type, ...], generation: int) -> Any:
    """Return an iterator over the objects; the call that uses it up must be its only holder."""
    # Two lists of the same objects, in the same order: the first list itself, which is the youngest
    # object, comes last in the second one. Both are read to their ends, which frees them: they have
    # the iterators among their objects, and would be kept alive by themselves.
    return compress(
        chain(chain.from_iterable(starmap(gc.get_objects, [(generation,)])), repeat(None)),
        map(
            issubclass,
            map(type, chain.from_iterable(starmap(gc.get_objects, [(generation,)]))),
            repeat(kinds),
        ),
    )


# --- tensors that were created inside


_IN_ORDER = "t" not in getattr(sys, "abiflags", "")


class _Creations:
    """Tensors that collections moved out of the youngest generation while levels were active."""

    def __init__(self) -> None:
        self.levels = 0  # the number of levels met
        self.noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # Tensors that replace older tensors: the outermost level that they count as created outside
        # of.
        self.older: dict[int, tuple[weakref.ref[torch.Tensor], TracerLevel]] = {}


_creations: Final = _Creations()


def _before_collection(phase: str, info: Mapping[str, Any]) -> None:
    """Note the tensors of the youngest generation, each with its number of earlier levels.

    A reused id does no harm: its new tensor is young, or a later collection notes it.
    """
    if phase != "start":
        return
    if not active_levels:
        _creations.noted.clear()
        _creations.older.clear()
        return
    noted = _creations.noted
    for item in live_objects_in_collection((torch.Tensor, TracerLevel), generation=0):
        if issubclass(type(item), TracerLevel):
            _creations.levels += 1
            item.created_at = _creations.levels
        else:
            noted[id(item)] = weakref.ref(item), _creations.levels


def _watch_collections() -> None:
    """Register the callback; the first level is there already, and may have left generation 0."""
    for item in live_objects((TracerLevel,)):
        item.created_at = _creations.levels = 1
    gc.callbacks.append(_before_collection)


on_first_level(_watch_collections)


def created_in(level: TracerLevel) -> dict[int, torch.Tensor]:
    """Return the live tensors that were created after the level, by id."""
    found = _younger(level) if _IN_ORDER else {}
    for reference, outside in list(_creations.older.values()):
        tensor = reference()
        if tensor is not None and (outside is level or outside in level.outer.levels):
            found.pop(id(tensor), None)
    return found


def _younger(level: TracerLevel) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for item in reversed(live_objects((torch.Tensor, type(level)), generation=0)):
        if item is level:
            return found
        if issubclass(type(item), torch.Tensor):
            found[id(item)] = item
    if level.created_at:
        for reference, position in list(_creations.noted.values()):
            tensor = reference()
            if tensor is not None and position >= level.created_at:
                found[id(tensor)] = tensor
    return found


def take_place(old: torch.Tensor, new: torch.Tensor, level: TracerLevel) -> None:
    """Let a new tensor replace an older one among the values of a level.

    For each level inside ``level``, the new tensor counts as created outside if the old tensor was.
    """
    active = tuple(active_levels)
    inner = [d for d in active if isinstance(d, TracerLevel) and level in d.outer.levels]
    without = [d for d in inner if id(old) not in created_in(d)]
    if without:
        outermost = min(without, key=lambda d: d.depth)
        _creations.older[id(new)] = weakref.ref(new), outermost
