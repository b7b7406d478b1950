"""Traced tensors with symbolic sizes, made as copies of tensors with the same metadata.

C++ takes a hundred microseconds to make a tensor with symbolic sizes: it calls Python to compute
the storage size, contiguity and order of strides. A copy reuses these results.

Private names used here (torch 2.13 and 2.14): ``Tensor._make_wrapper_subclass`` makes a tensor
without storage, ``Tensor._make_subclass`` makes an instance of a subclass as a C++ copy of another
tensor; ``_C._DisableTorchDispatch`` lets it do so without a dispatch to that tensor, and
``DisableTorchFunction`` disables function modes; ``FakeTensorMode`` computes results.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch._subclasses.fake_tensor import FakeTensorMode

from tsfunc.bridge.sizes.fake_results import MetadataKey, TraceMetadata, UnknownError
from tsfunc.bridge.tracers.questions import suppress_guards
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel

T = TypeVar("T", bound=Tracer)


class _Original(torch.Tensor):
    """The original of copied tracers; not a tracer, so that a search for tracers skips it."""

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> Any:
        raise AssertionError(f"what tracers are copies of is in a call: {call}")


class TracerCache:
    """The originals of the tracers of one trace.

    Args:
        fake: the mode of the trace.
        metadata: the metadata of its tensors.
    """

    def __init__(self, fake: FakeTensorMode, metadata: TraceMetadata) -> None:
        self._fake, self._metadata = fake, metadata
        self._originals: dict[MetadataKey, torch.Tensor] = {}

    def made(self, cls: type[T], value: Any, level: TracerLevel) -> T:
        """Return a tracer of a level with the metadata of a fake tensor."""
        with DisableTorchFunction():
            if any(type(size) is torch.SymInt for size in value.shape):
                with suppress(UnknownError):
                    return self._copy(cls, self._metadata.of(value), value, level)
            with suppress_guards(self._fake):
                return cls.make(value, level)

    def _copy(self, cls: type[T], metadata: MetadataKey, value: Any, level: TracerLevel) -> T:
        original = self._originals.get(metadata)
        if original is None:
            original = self._originals[metadata] = self._original(value)
        # Without autograd, because copies with autograd would share one version counter.
        with _DisableTorchDispatch(), without_autograd():
            tracer: T = torch.Tensor._make_subclass(cls, original)
        tracer.dispatch_level = level
        return tracer

    def _original(self, value: torch.Tensor) -> torch.Tensor:
        with suppress_guards(self._fake):
            return torch.Tensor._make_wrapper_subclass(
                _Original, value.shape, value.stride(), value.storage_offset(),
                dtype=value.dtype, device=value.device,
            )  # fmt: skip
