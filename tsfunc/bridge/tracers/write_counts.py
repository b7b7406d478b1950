"""The numbers of writes into tensors, by which results that were kept are known to be valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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
