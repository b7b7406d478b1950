"""Traced tensors with symbolic sizes, made as copies of tensors with the same metadata.

C++ takes a hundred microseconds to make a tensor with symbolic sizes: it calls Python to compute
the storage size, contiguity and order of strides. A copy reuses these results.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._C import _DisableTorchDispatch

from tsfunc.bridge.sizes.fake_results import IncompleteMetadataError, MetadataKey, TraceMetadata
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.bridge.tracers.user_queries import suppress_guards

T = TypeVar("T", bound=Tracer)


class _Original(torch.Tensor):
    """The original of copied tracers; not a tracer, so that a search for tracers skips it."""

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> Any:
        raise AssertionError(f"the original of copied tracers is in a call: {call}")


def tracer_copy(
    cls: type[T],
    value: Any,
    level: TracerLevel,
    metadata: TraceMetadata,
    originals: dict[MetadataKey, torch.Tensor],
) -> T | None:
    """Return a tracer of a level, as a copy of an original with the metadata of a fake tensor.

    None if the metadata can't be a key.

    Args:
        originals: the originals of the level; gets another one if there is none.
    """
    try:
        key = metadata.of(value)
    except IncompleteMetadataError:
        return None
    original = originals.get(key)
    if original is None:
        with suppress_guards(value.fake_mode):
            original = originals[key] = torch.Tensor._make_wrapper_subclass(
                _Original, value.shape, value.stride(), value.storage_offset(),
                dtype=value.dtype, device=value.device,
            )  # fmt: skip
    # Without autograd, because copies with autograd would share one version counter.
    with _DisableTorchDispatch(), without_autograd():
        tracer: T = torch.Tensor._make_subclass(cls, original)
    tracer.dispatch_level = level
    return tracer
