"""The classes whose attributes a trace watches.

NOTE [watched classes]
For the time of a trace, a watched class has a ``__getattribute__`` and a ``__setattr__`` of ours,
which report the attributes that are read and assigned. The objects stay the same: their class,
identity and ``isinstance`` are unchanged, and a method runs as it is, with its own reads reported
too. Objects without a watcher, and objects on other threads, behave as before. A class that does
not accept attributes (one that is written in C) is not watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # of CPython's type flags
_GET, _SET, _DELETE = "__getattribute__", "__setattr__", "__delattr__"
_ABSENT: Any = object()

OURS = frozenset({_GET, _SET, _DELETE})
"""The methods that a class has replaced while it is watched."""


class Watcher(Protocol):
    """The receiver of reads and assignments of attributes."""

    def read(self, instance: Any, name: str, plain: Callable[[Any, str], Any]) -> Any:
        """Return the value of an attribute; `plain` reads it as the class itself does."""

    def assigned(self, instance: Any, name: str, *value: Any) -> None:
        """Note that an attribute is about to be assigned, or deleted if there is no value."""


class _Here(threading.local):
    """The watcher of this thread."""

    watcher: Watcher | None = None


_here = _Here()
_lock = threading.Lock()
_watched: dict[type, tuple[int, dict[str, Any]]] = {}
"""By class: the number of its watchers, and its own methods under these names."""


def can_watch(cls: type) -> bool:
    """Return True if attributes of the class can be set."""
    # Metaclasses of C extensions (pybind11's) refuse `type.__setattr__` on their classes.
    plain: Any = type(cls).__setattr__
    mutable = cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _IMMUTABLE_TYPE
    return bool(mutable) and plain is type.__setattr__


class Watching:
    """A block in which a watcher receives the reads and assignments of attributes."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._classes: set[type] = set()
        self._outer: Watcher | None = None

    def __enter__(self) -> Watching:
        self._outer, _here.watcher = _here.watcher, self._watcher
        return self

    def __exit__(self, *exc: object) -> None:
        _here.watcher = self._outer
        for cls in self._classes:
            _unwatch(cls)
        self._classes.clear()

    def add(self, cls: type) -> None:
        """Report the attributes of a class's instances to the watcher."""
        if cls not in self._classes:
            self._classes.add(cls)
            _watch(cls)


def _watch(cls: type) -> None:
    with _lock:
        count, own = _watched.get(cls, (0, {}))
        if not count:
            own = {name: vars(cls).get(name, _ABSENT) for name in (_GET, _SET, _DELETE)}
            ours = (_reading(_plain(cls, _GET)), _assigning(_plain(cls, _SET)),
                    _assigning(_plain(cls, _DELETE)))  # fmt: skip
            for name, function in zip(own, ours, strict=True):
                type.__setattr__(cls, name, function)
        _watched[cls] = count + 1, own


def _unwatch(cls: type) -> None:
    with _lock:
        count, own = _watched.pop(cls)
        if count > 1:
            _watched[cls] = count - 1, own
            return
        for name, value in own.items():
            if value is _ABSENT:
                type.__delattr__(cls, name)
            else:
                type.__setattr__(cls, name, value)


def _plain(cls: type, name: str) -> Any:
    """Return the class's own function, skipping ours in the class and its bases."""
    for base in cls.__mro__:
        own = _watched[base][1].get(name, _ABSENT) if base in _watched else _ABSENT
        found = own if base in _watched else vars(base).get(name, _ABSENT)
        if found is not _ABSENT:
            return found
    raise AssertionError(f"object has {name}")


def _reading(plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        watcher = _here.watcher
        return plain(self, name) if watcher is None else watcher.read(self, name, plain)

    return __getattribute__


def _assigning(plain: Callable[..., None]) -> Callable[..., None]:
    def __setattr__(self: Any, name: str, *value: Any) -> None:
        watcher = _here.watcher
        if watcher is not None:
            watcher.assigned(self, name, *value)
        plain(self, name, *value)

    return __setattr__
