"""How examples lie in memory, where operators give their results the layout of their arguments.

torch lays the result of some operators out with the channels last if their argument is so: for
tensors of four or five dims. A batch of such examples has a dim more, and is none. Rules of these
operators run on a view of the batch that has the channels' dim last, and is laid out as usual.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tsfunc.ops.dims import front


def channels_last(x: Tensor, at: int | None) -> bool:
    """Whether each example has its channels last in memory, as torch decides it from strides."""
    rank = x.dim() - (at is not None)
    if rank not in (4, 5):
        return False
    pairs = [pair for dim, pair in enumerate(zip(x.shape, x.stride(), strict=True)) if dim != at]
    least: Any = 0
    for dim in (1, *range(rank - 1, 1, -1), 0):
        size, step = pairs[dim]
        if type(size) is not int or type(step) is not int:
            return False  # sizes of a trace are not asked for their order
        # Channels of size 1 lie both ways, which counts as the usual one.
        if not size or not step or step < least or (not dim and least == pairs[1][1]):
            return False
        least = step * size
    return True


def channels_moved(x: Tensor, at: int | None) -> Tensor:
    """The value with its batch dim first and the channels' dim last."""
    return front(x, at).movedim(2, -1)


def channels_back(x: Tensor) -> Tensor:
    """What ``channels_moved`` did, undone."""
    return x.movedim(-1, 2)


def moved_dim(dim: int, rank: int) -> int:
    """Where ``channels_moved`` has a logical dim of examples of ``rank`` dims."""
    return {0: 1, 1: rank}.get(dim, dim)
