"""Tells the tensors that a transformed function found outside from those that it made.

NOTE [tensors from outside]
A plain tensor does not record who made it, and the torch calls that make tensors are not watched,
because plain tensors must stay as fast as torch's. When the function first writes batched values
into a plain tensor, which is rare, a search decides: a tensor is from outside if it shares memory
with one that the function's arguments, or the function itself, reach (NOTE [reachable tensors] in
``tracers/reachable``). A tensor that the function made and then stored in an object from outside is
therefore from outside too: if it became a tracer, the object would keep the tracer of a transform
that has ended.

The search does not see the state of libraries and of C extensions. Therefore a tensor that is older
than every active level is from outside in any case: it is not among the :func:`recent_tensors`. The
test needs no order of objects: while levels are active, each collection begins with a note of the
tensors in the youngest generation, which it is about to move to an older one. The tensors made
since the outermost level was entered are those noted and those in the youngest generation now;
among them are some that are a little older.

The module uses only public names: ``gc.get_objects``, ``gc.get_referents`` and ``gc.callbacks``.

NOTE [half-made tuples]
``gc.get_objects`` also returns the objects that other threads are making, such as the tuple of
``tuple(generator)``. CPython extends such a tuple in place, and raises a SystemError in that thread
if anything else refers to the tuple. The objects are therefore chosen by iterators in C, in one
call: no other thread runs before the references to all other objects are gone. A collection would
run Python code in between, so it is put off.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from itertools import chain, compress, repeat, starmap, tee
from typing import Any, Final

import torch

from tsfunc.bridge.tracers.interrupts import undoing
from tsfunc.bridge.tracers.reachable import ModuleEntry, Reachable
from tsfunc.bridge.tracers.registrations import on_first_level
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.bridge.writing.storages import memory_of, memory_under, tensor_with_memory
from tsfunc.dispatch.state import active_levels


class OutsideTensors:
    """The tensors that the function of a level reaches from outside, and their memory.

    Attributes:
        entries: the parameters and buffers of modules from outside, some of which may be made
            inside (NOTE [state of modules] in ``module_state``).
    """

    def __init__(self, level: TracerLevel) -> None:
        reachable = Reachable(level.outside_roots)
        self._tensors = {id(tensor): tensor for tensor in reachable.tensors}
        self._memories = {memory_of(tensor) for tensor in self._tensors.values()} - {None}
        self.entries = reachable.entries

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """True if a tensor shares memory with one from outside, entries of modules apart."""
        return id(tensor) in self._tensors or memory_under(tensor) in self._memories

    def entries_of(self, memory: int) -> list[ModuleEntry]:
        """Return the entries of modules that have a memory."""
        return [entry for entry in self.entries if memory_under(entry.tensor) == memory]


# --- the tensors made since the outermost level was entered


_noted: Final[dict[int, weakref.ref[torch.Tensor]]] = {}


def recent_tensors() -> dict[int, torch.Tensor]:
    """Return the live tensors by id, without those older than the outermost active level."""
    for tensor in _recent_objects().values():
        tensor_with_memory(tensor)  # makes the Python object of a value that had none
    return _recent_objects()


def _recent_objects() -> dict[int, torch.Tensor]:
    # The youngest generation comes first: a collection after it moves and notes tensors that the
    # list has. A reused id does no harm: its tensor is young, or a collection has noted it.
    young = live_tensors(generation=0)
    noted = [reference() for reference in list(_noted.values())]
    recent = {id(tensor): tensor for tensor in noted if tensor is not None}
    recent.update((id(tensor), tensor) for tensor in young)
    return recent


def _before_collection(phase: str, info: Mapping[str, Any]) -> None:
    """Note the tensors that a collection is about to move out of the youngest generation.

    The tensors that other threads make between the note and the collection would be moved without
    a note. CPython changes threads at calls and at jumps back; the note is therefore an operator
    over iterators in C, and nothing is called after it.
    """
    noted = _noted
    if phase != "start":
        return
    if not active_levels:
        noted.clear()
    if active_levels:  # another thread may have entered one during the call
        tensors, same = tee(_tensors_of_generation(0))
        noted |= zip(map(id, tensors), map(weakref.ref, same), strict=True)


on_first_level(gc.callbacks.append, _before_collection)


# --- live tensors


_lock = threading.RLock()


def live_tensors(generation: int | None = None) -> list[torch.Tensor]:
    """Return the tensors and tracers that the collector tracks.

    Args:
        generation: the generation of the collector to look in; None for all.
    """
    with _lock:
        if not gc.isenabled():
            return _live_tensors(generation)
        with undoing(gc.enable):
            gc.disable()
            return _live_tensors(generation)


def _live_tensors(generation: int | None) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for index in range(len(gc.get_count())) if generation is None else (generation,):
        tensors.extend(_tensors_of_generation(index))
    return tensors


def _tensors_of_generation(generation: int) -> Any:
    """Return an iterator over the tensors; the call that uses it up must be its only holder."""
    # Two lists of the same objects, in the same order: the first list itself, which is the youngest
    # object, comes last in the second one. Both are read to their ends, which frees them: they have
    # the iterators among their objects, and would be kept alive by themselves.
    return compress(
        chain(chain.from_iterable(starmap(gc.get_objects, [(generation,)])), repeat(None)),
        map(
            issubclass,
            map(type, chain.from_iterable(starmap(gc.get_objects, [(generation,)]))),
            repeat(torch.Tensor),
        ),
    )
