"""The versions of fake tensors: the writes to their storages without FakeTensorMode count too.

FakeTensorMode remembers data-dependent results, such as that of ``x.item()``, with the version of
the tensor, and torch counts a version for a tensor and its views together. A fake tensor that is
made without the mode has a version of its own, and so has each of its views. The writes are
therefore counted on the storage, and before a call reaches the mode, the version of each argument
is brought up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version

# The attribute of a storage with the number of writes to it, and that of a tensor with the number
# of those that its version includes.
_WRITES: Final = "_tsfunc_writes"


def count_write(x: torch.Tensor) -> None:
    """Count a write to a fake tensor, for all that share its storage."""
    increment_version(x)
    _note_write(x)


@contextmanager
def counting_writes(args: Sequence[Any]) -> Iterator[None]:
    """Context manager: count the writes of a call to its arguments."""
    tensors = list(fakes_in(args))
    before = [x._version for x in tensors]
    yield
    for x, version in zip(tensors, before, strict=True):
        if x._version != version:
            _note_write(x)


def update_versions(args: Iterable[Any]) -> None:
    """Let the versions of a call's arguments include all writes to their storages."""
    for x in fakes_in(args):
        writes = _attributes(x).get(_WRITES, 0)
        if x.__dict__.get(_WRITES, 0) != writes:
            x.__dict__[_WRITES] = writes
            increment_version(x)


def version_of(x: torch.Tensor) -> tuple[int, int]:
    """Return a value that differs after each write to a tensor or to one that shares its memory."""
    fake = type(x) is FakeTensor and x.layout is torch.strided
    writes = _attributes(x).get(_WRITES) if fake else None
    return (x._version, 0) if writes is None else (0, writes)


def _note_write(x: torch.Tensor) -> None:
    """Note a write that the version of the tensor itself includes already."""
    attributes = _attributes(x)
    attributes[_WRITES] = x.__dict__[_WRITES] = attributes.get(_WRITES, 0) + 1


def _attributes(x: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor's storage; function modes do not see the call."""
    with DisableTorchFunction():
        return x.untyped_storage().__dict__


def fakes_in(args: Iterable[Any]) -> Iterator[FakeTensor]:
    """Yield the fake tensors with a storage among arguments and in their lists."""
    for x in args:
        if type(x) is FakeTensor:
            if x.layout is torch.strided:
                yield x
        elif isinstance(x, list | tuple):
            yield from fakes_in(x)
