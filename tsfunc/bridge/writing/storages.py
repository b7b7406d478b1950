"""The memory of tensors: which of them share a storage, and how often it was written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction

from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.tracer import Tracer


def tensor_with_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor with memory at the bottom of a stack of tracers, or None."""
    value = innermost_value(tensor)
    return value if isinstance(value, torch.Tensor) else None


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return an identifier of a tensor's storage; None for a tracer and without a storage."""
    if isinstance(tensor, Tracer):
        return None
    try:
        # A layout is not asked for: a class of tensors can have one of its own, which a dispatch
        # mode would be called for. Tensors of other layouts raise an error here. The function mode
        # of a traced body would replace the tensor by a tracer.
        with DisableTorchFunction():
            return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def memory_under(tensor: torch.Tensor) -> int | None:
    """Return an identifier of the storage at the bottom of a stack of tracers, or None."""
    plain = tensor_with_memory(tensor)
    return None if plain is None else memory_of(plain)


def write_counts(tensors: Sequence[torch.Tensor]) -> list[Any] | None:
    """Return a value that changes if one of the tensors is written to or gets another memory.

    Returns:
        The count of writes and the address of each, and the current streams of their devices;
        None if torch does not count the writes into one of them.
    """
    if any(map(torch.Tensor.is_inference, tensors)):
        return None
    counts: list[Any] = [x._version for x in tensors]
    counts += [x.data_ptr() for x in tensors]
    counts += [torch.accelerator.current_stream(x.device) for x in tensors if not x.is_cpu]
    return counts
