"""Levels that stand for other levels, and tensors as the running code must see them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from types import MemberDescriptorType
from typing import Any, Final

import torch

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.tracer import sync
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import tls


class LevelProxy:
    """A level that replaces another level and remaps its tensors (``subsets``, ``bodies``)."""

    __slots__ = ()

    def copy_from(self, level: Level) -> None:
        """Copy all attributes of the replaced level; the subclass then sets its own."""
        proxy_class: type = type(self)
        other: type = type(level)
        for name in (*_copied_slots(proxy_class, other), "inner"):
            setattr(self, name, getattr(level, name))

    def remap(self, value: Any) -> Any:
        """Return a tensor from outside as the code at the level must see it."""
        raise NotImplementedError


@functools.cache
def _copied_slots(proxy_class: type, other: type) -> tuple[str, ...]:
    """Return the slots of a level's class that its replacement has too, except properties."""
    names = [name for cls in other.__mro__ for name in cls.__dict__.get("__slots__", ())]
    places = [(name, getattr(proxy_class, name, None)) for name in names]
    return tuple(name for name, place in places if isinstance(place, MemberDescriptorType))


class _Substitutions(threading.local):
    """The replacements of tensors for the code on this thread: ``substitution``."""

    def __init__(self) -> None:
        self.values: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: torch.Tensor) -> torch.Tensor:
        replacement = self.values.get(id(value))
        return value if replacement is None else replacement[1]


substitutions: Final = resets(_Substitutions())


def as_seen_by_current_level(value: Any) -> Any:
    """Return a tensor as the running code must see it, remapped by level proxies.

    Outer levels come first, because an inner level must wrap the result of the outer ones.
    """
    if isinstance(value, torch.Tensor):
        if substitutions.values:
            value = substitutions.of(value)
        sync(value)
        for level in tls.state.levels:
            if isinstance(level, LevelProxy):
                value = level.remap(value)
    return value


def all_as_seen_by_current_level(values: list[Any]) -> list[Any]:
    """Return a transform's inputs as the running code sees them, for uses other than calls."""
    if not any(isinstance(level, LevelProxy) for level in tls.state.levels):
        return values
    return [as_seen_by_current_level(value) for value in values]
