"""Traced tensors of symbolic sizes, made as copies of others that look the same.

C++ takes a hundred microseconds to make a tensor of symbolic sizes: it asks them, in Python, how
much memory they need, whether they are contiguous, and in which order. A copy has the answers.

Private names used here (torch 2.11 to 2.13): ``Tensor._make_wrapper_subclass`` makes a tensor
without storage, ``Tensor._make_subclass`` one of a class out of another, which C++ copies;
``_C._DisableTorchDispatch`` has it do so without asking that one, and ``DisableTorchFunction``
keeps function modes out; ``FakeTensorMode`` works results out.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch._subclasses.fake_tensor import FakeTensorMode

from tsfunc.bridge.sizes.kept_results import Look, Looks, UnknownError
from tsfunc.bridge.tracers.questions import unasked
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel

T = TypeVar("T", bound=Tracer)


class _Original(torch.Tensor):
    """What tracers are copies of. It is none itself: who looks for tracers is not to find it."""

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> Any:
        raise AssertionError(f"what tracers are copies of is in a call: {call}")


class Copies:
    """What the tracers of one trace are copies of.

    Args:
        fake: the mode of the trace.
        looks: how its tensors look.
    """

    def __init__(self, fake: FakeTensorMode, looks: Looks) -> None:
        self._fake, self._looks = fake, looks
        self._originals: dict[Look, torch.Tensor] = {}

    def made(self, cls: type[T], value: Any, level: TracerLevel) -> T:
        """A tracer of a level that looks like a fake tensor."""
        with DisableTorchFunction():
            if any(type(size) is torch.SymInt for size in value.shape):
                with suppress(UnknownError):
                    return self._copy(cls, self._looks.of(value), value, level)
            with unasked(self._fake):
                return cls.make(value, level)

    def _copy(self, cls: type[T], look: Look, value: Any, level: TracerLevel) -> T:
        original = self._originals.get(look)
        if original is None:
            original = self._originals[look] = self._original(value)
        # Without autograd, or a write into one of them would count as one into all.
        with _DisableTorchDispatch(), without_autograd():
            tracer: T = torch.Tensor._make_subclass(cls, original)
        tracer.dispatch_level = level
        return tracer

    def _original(self, value: torch.Tensor) -> torch.Tensor:
        with unasked(self._fake):
            return torch.Tensor._make_wrapper_subclass(
                _Original, value.shape, value.stride(), value.storage_offset(),
                dtype=value.dtype, device=value.device,
            )  # fmt: skip
