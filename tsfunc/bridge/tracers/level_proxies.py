"""Tensors as the running code must see them: levels that stand for others, and substitutions.

NOTE [hidden operands]
An ``autograd.Function`` calls the user's rule: at levels outside of the rule's own level, in
programs, and perhaps after that level has ended. The tensors that the rule closes over must come
along: they are operands of the call besides its arguments, and the code sees their replacements.
The references in the closure itself do not change, so the arguments of each torch call and of each
transform are searched for these tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MemberDescriptorType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.operators import map_items
from tsfunc.bridge.tracers.tracer import sync
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import overriding, tls


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
    """The replacements of tensors for the code on this thread: NOTE [hidden operands]."""

    def __init__(self) -> None:
        self.values: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: torch.Tensor) -> torch.Tensor:
        replacement = self.values.get(id(value))
        return value if replacement is None else replacement[1]


_substitutions: Final = resets(_Substitutions())


def as_seen_by_current_level(value: Any) -> Any:
    """Return a tensor as the running code must see it, remapped by level proxies.

    Outer levels come first, because an inner level must wrap the result of the outer ones.
    """
    if isinstance(value, torch.Tensor):
        if _substitutions.values:
            value = _substitutions.of(value)
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


@contextmanager
def substitute_tensors(
    originals: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Replace the tensors that a block's code closes over by these values."""
    replaced = {
        id(x): (x, value) for x, value in zip(originals, values, strict=True) if x is not value
    }
    if not replaced:
        yield
        return
    with overriding(_substitutions, values={**_substitutions.values, **replaced}), _Substitution():
        yield


class _Substitution(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tls.state.running is not None:
            return func(*args, **kwargs)
        args = tuple([map_items(_substitute, arg) for arg in args])
        return func(*args, **{name: map_items(_substitute, arg) for name, arg in kwargs.items()})


def _substitute(value: Any) -> Any:
    return _substitutions.of(value) if isinstance(value, torch.Tensor) else value
