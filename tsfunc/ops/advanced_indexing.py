"""Indexing with tensors: ``x[i, :, j]`` and ``x[i, :, j] = v``.

NOTE [advanced indexing]
The broadcast shape of the indices replaces the indexed logical dims. The broadcast dims stand in
the place of the first index if the indices are adjacent, and before all other dims if they are not.
If only the values are batched, the batch dim is a dim that is not indexed. If only the indices are
batched, it is part of their broadcast shape. If both are batched, it is indexed by ``arange``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    align_batch_dim,
    at_least_one_entry,
    batch_to_front,
    broadcast_to_front,
    expand_to_front,
    logical_rank,
    logical_shape,
    refuse_inplace,
    unit_dims,
)
from tsfunc.ops.dynamic import nonzeros, refuse_dynamic_size
from tsfunc.ops.refusal import raise_as_one_example, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


class Lookup(NamedTuple):
    """Logical indices: masks are replaced by integers, batch dims are first and aligned."""

    indices: list[Tensor | None]
    batched: bool
    first: int  # the dim of the first index
    adjacent: bool  # True if the indices are adjacent
    rank: int  # the rank of the indices' broadcast shape
    used: int  # the number of indices


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _without_masks(indices: Sequence[Any], bdims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Replace each unbatched mask by the integer indices of its True elements."""
    positions_and_indices: list[Any] = []
    kept_bdims: list[Any] = []
    for index, bdim in zip(indices, bdims, strict=True):
        if _is_mask(index):
            positions = index.nonzero().unbind(1)
            positions_and_indices += positions
            kept_bdims += [None] * len(positions)
        else:
            positions_and_indices.append(index)
            kept_bdims.append(bdim)
    return positions_and_indices, kept_bdims


def _masks_fit(x: Tensor, bdim: int | None, indices: Sequence[Any], bdims: Sequence[Any]) -> bool:
    """True if each mask has the sizes of the dims that it indexes. A symbolic size fits."""
    sizes = logical_shape(x, bdim)
    for index, index_bdim in zip(indices, bdims, strict=True):
        if not _is_mask(index):
            sizes = sizes[1:]
            continue
        shape = logical_shape(index, index_bdim)
        indexed, sizes = sizes[: len(shape)], sizes[len(shape) :]
        if len(indexed) < len(shape):
            return False
        pairs = zip(shape, indexed, strict=True)
        if any(type(a) is int and type(b) is int and a != b for a, b in pairs):
            return False
    return True


def analyze_indices(indices: Sequence[Any], bdims: Sequence[Any] | None) -> Lookup:
    """Analyze indices that contain no batched mask."""
    bdims = [None] * len(indices) if bdims is None else bdims
    if any(_is_mask(index) for index in indices):
        indices, bdims = _without_masks(indices, bdims)
    where = [i for i, index in enumerate(indices) if index is not None]
    rank = max((logical_rank(indices[i], bdims[i]) for i in where), default=0)
    lined_up = [
        index
        if index is None or bdim is None
        else unit_dims(batch_to_front(index, bdim), 1, rank + 1 - index.dim())
        for index, bdim in zip(indices, bdims, strict=True)
    ]
    adjacent = not where or where[-1] - where[0] + 1 == len(where)
    batched = any(bdim is not None for bdim in bdims)
    return Lookup(lined_up, batched, where[0] if where else 0, adjacent, rank, len(where))


def _every_example(where: Lookup, like: Tensor) -> list[Tensor | None]:
    """Return the indices preceded by one that pairs each example with itself."""
    examples = torch.arange(like.shape[0], device=like.device)
    return [examples.view(-1, *[1] * where.rank), *where.indices]


@row("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def index(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """See NOTE [advanced indexing]."""
    x, indices = args
    if not _masks_fit(x, bdims[0], indices, bdims[1] or [None] * len(indices)):
        return raise_as_one_example(op, bdims, args, kwargs)
    if bdims[1] is not None and _batched_mask(indices, bdims[1]):
        instead = "Use torch.where(mask, x, fill) instead of x[mask]"
        indices, named = _mask_positions(op, level, indices, bdims[1], instead)
        bdims = [bdims[0], named]
    position = analyze_indices(indices, bdims[1])
    if bdims[0] is None:
        return op(x, position.indices), position.first if position.adjacent else 0
    x = batch_to_front(x, bdims[0])
    if not position.batched:
        return op(x, [None, *position.indices]), 0 if position.adjacent else position.rank
    out = op(x, _every_example(position, x))
    if position.adjacent and position.first:
        start = position.rank + 1
        lead = range(start, start + position.first)
        out = out.movedim(tuple(lead), tuple(range(1, position.first + 1)))
    return out, 0


def _mask_positions(
    op: Any, level: RuleLevel, indices: Sequence[Any], bdims: Sequence[Any], instead: str
) -> tuple[list[Any], list[Any]]:
    """Replace each batched mask by integer indices; all examples must have equally many."""
    if level.splitter is None:
        refuse_dynamic_size(op, instead)
    masks = [
        batch_to_front(index, bdim)
        for index, bdim in zip(indices, bdims, strict=True)
        if _is_mask(index) and bdim is not None
    ]
    positions = iter(nonzeros(op, level, masks))
    positions_and_indices: list[Any] = []
    kept_bdims: list[Any] = []
    for index, bdim in zip(indices, bdims, strict=True):
        if _is_mask(index) and bdim is not None:
            integers = next(positions).unbind(2)
            positions_and_indices += integers
            kept_bdims += [0] * len(integers)
        else:
            positions_and_indices.append(index)
            kept_bdims.append(bdim)
    return positions_and_indices, kept_bdims


def _batched_mask(indices: Sequence[Any], bdims: Sequence[Any]) -> bool:
    return any(_is_mask(i) and bdim is not None for i, bdim in zip(indices, bdims, strict=True))


def _values(indices: Lookup, v: Tensor, bdim: int | None, rank: int) -> Tensor:
    """Align the values to be written with the result of the physical indexing."""
    rank += indices.rank - indices.used
    if not indices.batched:
        return align_batch_dim(v, bdim, rank if indices.adjacent else rank - indices.rank)
    if not (indices.adjacent and indices.first):
        return align_batch_dim(v, bdim, rank)
    v = broadcast_to_front(v, bdim)
    v = unit_dims(v, 1, rank + 1 - v.dim())
    lead = tuple(range(1, indices.first + 1))
    return v.movedim(lead, tuple(d + indices.rank for d in lead))


def _write_values(op: Any, x: Tensor, bdims: BatchDims, args: Args) -> Tensor:
    """Write the values into ``x``, whose batch dim is first."""
    _, indices, v, *rest = args
    looked_up = analyze_indices(indices, bdims[1])
    values = _values(looked_up, v, bdims[2], x.dim() - 1)
    where = _every_example(looked_up, x) if looked_up.batched else [None, *looked_up.indices]
    return op(x, where, values, *rest)


def _one_mask(indices: Sequence[Any]) -> int | None:
    """Return the position of the only index if it is a mask, else None."""
    named = [i for i, index in enumerate(indices) if index is not None]
    return named[0] if len(named) == 1 and _is_mask(indices[named[0]]) else None


def _masked_values(
    x: Tensor, first: int, mask: Tensor, values: Tensor, bdim: int | None
) -> tuple[Tensor, Tensor]:
    """Return the mask and the values, both broadcastable to ``x``.

    The mask starts at dim ``first``.

    ``x`` and ``mask`` have the batch dim first.
    """
    over = mask.dim() - 1
    right = x.dim() - 1 - first - over
    rank = logical_rank(values, bdim)
    values = broadcast_to_front(values, bdim)
    if rank > right:
        along = values.dim() - 1 - right  # the dim of the mask's True elements
        if values.shape[along] == 1:
            values = unit_dims(values.squeeze(along), along, over)
        else:
            values = _at_places(mask, values, along)
        rank += over - 1
    shown = unit_dims(unit_dims(mask, 1, first), first + over + 1, right)
    return shown, unit_dims(values, 1, x.dim() - 1 - rank)


def _at_places(mask: Tensor, values: Tensor, along: int) -> Tensor:
    """Scatter one value for each True element of a mask, in order, over the dims of the mask."""
    count, over = values.shape[along], mask.dim() - 1
    require(
        mask.flatten(1).sum(1) == count,
        f"shape mismatch: there are {count} values to be put at the positions of a mask that has "
        f"another number of positions, for some example of a vmap",
    )
    values = at_least_one_entry(values.movedim(along, 1))
    order = unit_dims((mask.flatten(1).cumsum(1) - 1).clamp(min=0), 2, values.dim() - 2)
    size = max(order.shape[0], values.shape[0])
    order = order.expand(size, -1, *values.shape[2:])
    spread = values.expand(size, *values.shape[1:]).gather(1, order)
    positions = range(over)
    out: Tensor = spread.unflatten(1, mask.shape[1:])
    return out.movedim([1 + i for i in positions], [along + i for i in positions])


def _index_put(op: Any, level: RuleLevel, x: Tensor, bdims: BatchDims, args: Args) -> Any:
    """Return the result of an ``index_put``, or ``x`` if it was written in place.

    The batch dim of ``x`` is first. The result is NotImplemented if no rule serves the call.
    """
    inplace = op.name() in ("aten::index_put_", "aten::_index_put_impl_")
    indices, values = args[1], args[2]
    index_bdims = bdims[1] or [None] * len(indices)
    if not _masks_fit(x, 0, indices, index_bdims):
        return raise_as_one_example(op, bdims, args, {})
    first = _one_mask(indices)
    if first is not None and index_bdims[first] is None:
        # If there is one value for each True element, their number is not compared with 1.
        rank = x.dim() - 1 - indices[first].dim()
        first = None if logical_rank(values, bdims[2]) > rank - first else first
    if first is None:
        if _batched_mask(indices, index_bdims):
            instead = "Use torch.where(mask, values, x), with values of the shape of x,"
            indices, named = _mask_positions(op, level, indices, index_bdims, instead)
            args, bdims = [args[0], indices, *args[2:]], [bdims[0], named, *bdims[2:]]
        out = _write_values(op, x, bdims, args)
        return x if inplace else out
    adds = bool(len(args) > 3 and args[3])
    count = math.prod(logical_shape(values, bdims[2]))
    if values.dtype is not x.dtype and (adds or count != 1):  # torch casts one value
        return raise_as_one_example(op, bdims, args, {})
    mask, bdim = indices[first].bool(), index_bdims[first]
    mask = broadcast_to_front(mask, bdim)
    mask, values = _masked_values(x, first, mask, values, bdims[2])
    if adds:
        values = values + x
    result = torch.where(mask, values.to(x.dtype), x)
    if result.dim() != x.dim() or result.shape != x.shape:
        return raise_as_one_example(op, bdims, args, {})
    if inplace:
        return x.copy_(result)
    return result


@row("aten::index_put", "aten::_unsafe_index_put")
def index_put(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Write into a copy for each example."""
    x = expand_to_front(args[0], bdims[0], level.batch_size)
    out = _index_put(op, level, x, bdims, args)
    return out if out is NotImplemented else (out, 0)


@row("aten::index_put_", "aten::_index_put_impl_")
def index_put_inplace(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Write through a view that has the batch dim first."""
    if bdims[0] is None:
        refuse_inplace(op)
    out = _index_put(op, level, batch_to_front(args[0], bdims[0]), bdims, args)
    return out if out is NotImplemented else (args[0], bdims[0])
