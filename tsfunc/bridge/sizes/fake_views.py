"""Views among fake tensors that are made without FakeTensorMode, and their counts of writes.

torch counts the writes to a tensor and to its views together. A view that is made from a meta
tensor has a count of its own. The views of a storage are therefore registered here, and a write to
one of them is counted for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

_MOST: Final = 4096  # storages; the views of storages that are gone are removed then

# The fake tensors of a storage, by its identity. They keep it alive.
_sharing: dict[int, list[weakref.ref[torch.Tensor]]] = {}


def remember_view(view: torch.Tensor, source: torch.Tensor) -> None:
    """Register a view that does not share its count of writes with the source."""
    if len(_sharing) > _MOST:
        for key in [key for key, refs in list(_sharing.items()) if all(r() is None for r in refs)]:
            _sharing.pop(key, None)
    key = _storage(source)
    alive = [r for r in _sharing.get(key, ()) if r() is not None]
    if not any(r() is source for r in alive):
        alive.append(weakref.ref(source))
    _sharing[key] = [*alive, weakref.ref(view)]


def count_write(x: torch.Tensor) -> None:
    """Count a write to a fake tensor, for it and for all that share its storage."""
    increment_version(x)
    _count_for_others(x)


@contextmanager
def counting_writes(args: Sequence[Any]) -> Iterator[None]:
    """Context manager: count the writes of a call for all that share storages with arguments."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)] if _sharing else []
    before = [x._version for x in tensors]
    yield
    for x, version in zip(tensors, before, strict=True):
        if x._version != version:
            _count_for_others(x)


def _count_for_others(x: torch.Tensor) -> None:
    for ref in _sharing.get(_storage(x), ()):
        other = ref()
        if other is not None and other is not x:
            increment_version(other)


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
