"""The channels-last layout of examples, for operators whose results keep an argument's layout.

Some torch operators return a channels-last result for a channels-last argument of four or five
dims. A batch of such examples has one more dim, so torch does not recognize its layout. The rules
of these operators run the operator on a contiguous view of the batch, which has the channels' dim
last.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tsfunc.ops.dims import batch_to_front, logical_rank


def channels_last(x: Tensor, bdim: int | None) -> bool:
    """True if each example is channels-last, decided from its strides as torch does."""
    rank = logical_rank(x, bdim)
    if rank not in (4, 5):
        return False
    pairs = [pair for dim, pair in enumerate(zip(x.shape, x.stride(), strict=True)) if dim != bdim]
    least: Any = 0
    for dim in (1, *range(rank - 1, 1, -1), 0):
        size, step = pairs[dim]
        if type(size) is not int or type(step) is not int:
            return False  # symbolic sizes cannot be compared without a guard
        # With one channel both layouts have the same strides; torch treats that as contiguous.
        if not size or not step or step < least or (not dim and least == pairs[1][1]):
            return False
        least = step * size
    return True


def channels_moved(x: Tensor, bdim: int | None) -> Tensor:
    """Return the tensor with its batch dim first and the channels' dim last."""
    return batch_to_front(x, bdim).movedim(2, -1)


def channels_back(x: Tensor) -> Tensor:
    """Undo ``channels_moved``: move the channels' dim from the last position back to position 2."""
    return x.movedim(-1, 2)


def moved_dim(dim: int, rank: int) -> int:
    """Return a logical dim's position after ``channels_moved``; examples have ``rank`` dims."""
    return {0: 1, 1: rank}.get(dim, dim)
