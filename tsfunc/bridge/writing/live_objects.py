"""The live objects of some classes, found by Python's garbage collector.

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
from itertools import chain, compress, repeat, starmap
from typing import Any

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
