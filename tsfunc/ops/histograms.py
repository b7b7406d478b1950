"""Histograms: the bins are computed per element and counted by one scatter for all examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    batches_first,
    expand_to_front,
    flatten_examples,
    flatten_logical,
    logical_rank,
    with_defaults,
)
from tsfunc.ops.factories import evenly_spaced
from tsfunc.ops.keywords import keyword_bdim, takes_keywords
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def bin_counts(bins: Tensor, count: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the count of each bin for each example (dim 0), or the sum of its weights.

    The bin ``count`` stands for elements that are not counted.
    """
    size = bins.shape[0]
    if weight is None:
        weight = torch.ones((), dtype=dtype, device=bins.device)
    out = torch.zeros((size, count + 1), dtype=dtype, device=bins.device)
    return out.scatter_add(1, bins, weight.to(dtype).expand(bins.shape))[:, :count]


def _bounds(x: Tensor, low: Any, high: Any, widened: float) -> tuple[Tensor, Tensor]:
    """Return the range of each example (N, elements): as given, or its extreme elements."""
    if low == high and x.shape[1]:
        lows, highs = x.amin(1), x.amax(1)
    else:
        lows, highs = x.new_full((x.shape[0],), low), x.new_full((x.shape[0],), high)
    require(lows.isfinite() & highs.isfinite(), "histogram: the range of values is not finite")
    require(lows <= highs, "histogram: max must be larger than min")
    point = lows == highs
    return torch.where(point, lows - widened, lows), torch.where(point, highs + widened, highs)


@row("aten::histc")
def histc(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Bins of equal width. Without a range, the range of each example is used."""
    bins, low, high = with_defaults(args[1:], 100, 0, 0)
    x = flatten_examples(args[0], bdims[0])
    lows, highs = (b.unsqueeze(1) for b in _bounds(x, low, high, 1))
    positions = ((x - lows) * bins / (highs - lows)).to(torch.int64).clamp(0, bins - 1)
    positions = torch.where((x >= lows) & (x <= highs), positions, bins)
    return bin_counts(positions, bins, None, x.dtype), 0


def _edges(x: Tensor, bins: int, limits: Sequence[float] | None) -> Tensor:
    """Return the edges of equal bins for each example (N, elements)."""
    low, high = limits if limits is not None else (0, 0 if x.shape[1] else 1)
    lows, highs = _bounds(x, low, high, 0.5)
    return evenly_spaced(lows, highs, bins + 1)


def _bin_of(x: Tensor, edges: Tensor) -> Tensor:
    """Return the bin of each element (N, elements) between edges (N, bins + 1).

    The last bin includes its upper edge. An element outside of all bins gets the number of bins.
    """
    bins = edges.shape[1] - 1
    positions = torch.searchsorted(edges.contiguous(), x.contiguous(), right=True) - 1
    positions = torch.where(x == edges[:, -1:], bins - 1, positions)
    return torch.where((x >= edges[:, :1]) & (x <= edges[:, -1:]), positions, bins)


def _histogram(x: Tensor, edges: Sequence[Tensor], weight: Tensor | None, density: bool) -> Tensor:
    """Return the histogram of points (N, points, D) between edges (N, bins + 1) for each of D."""
    size = x.shape[0]
    shape = [e.shape[1] - 1 for e in edges]
    total = 1
    for extent in shape:
        total *= extent
    flat = x.new_zeros(x.shape[:2], dtype=torch.int64)
    outside = torch.zeros_like(flat, dtype=torch.bool)
    for d, (e, extent) in enumerate(zip(edges, shape, strict=True)):
        positions = _bin_of(x[:, :, d], e)
        outside = outside | (positions == extent)
        flat = flat * extent + positions
    flat = torch.where(outside, total, flat)
    out = bin_counts(flat, total, weight, x.dtype).view(size, *shape)
    if density:
        out = out / out.flatten(1).sum(1).view(-1, *[1] * len(shape))
        for d, e in enumerate(edges):
            out = out / e.diff(dim=1).view(size, *[1] * d, -1, *[1] * (len(shape) - 1 - d))
    return out


def _as_points(x: Tensor, bdim: int | None, size: int, rank: int) -> Tensor:
    """Return elements as points with one coordinate each, or points flattened into one dim."""
    x = expand_to_front(x, bdim, size)
    return flatten_logical(x).unsqueeze(-1) if rank == 0 else x.flatten(1, -2)


def _weight(bdims: BatchDims, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> Any:
    weight = kwargs.get("weight")
    if weight is None:
        return None
    return flatten_logical(expand_to_front(weight, keyword_bdim(bdims, args, "weight"), size))


@row("aten::histogram.bin_ct")
@refuse_like_torch
def histogram(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Equal bins over a given range, or over the range of each example."""
    size = level.batch_size
    x = _as_points(args[0], bdims[0], size, 0)
    (bins,) = with_defaults(args[1:], 100)
    edges = _edges(x[:, :, 0], bins, kwargs.get("range"))
    weight = _weight(bdims, args, kwargs, size)
    return (_histogram(x, [edges], weight, kwargs.get("density", False)), edges), 0


@row("aten::histogram.bins_tensor")
@refuse_like_torch
def histogram_between(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Bins between given edges, which are also returned."""
    size = level.batch_size
    x = _as_points(args[0], bdims[0], size, 0)
    edges = expand_to_front(args[1], bdims[1], size)
    weight = _weight(bdims, args, kwargs, size)
    out = _histogram(x, [edges], weight, kwargs.get("density", False))
    return (out, args[1].clone()), (0, bdims[1])


@row("aten::_histogramdd_bin_edges")
@refuse_like_torch
def histogramdd_edges(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Return the edges for each coordinate."""
    if logical_rank(args[0], bdims[0]) < 2 or len(args[1]) != _coordinates(args[0], bdims[0]):
        return raise_as_one_example(op, bdims, args, kwargs)
    x = _as_points(args[0], bdims[0], level.batch_size, 1)
    return _edges_of_all(x, args[1], kwargs.get("range")), 0


def _coordinates(x: Tensor, bdim: int | None) -> Any:
    """Return the number of coordinates of each point."""
    return x.shape[-2 if bdim == x.dim() - 1 else -1]


def _edges_of_all(x: Tensor, bins: Sequence[int], limits: Sequence[float] | None) -> list[Tensor]:
    return [
        _edges(x[:, :, d], count, None if limits is None else limits[2 * d : 2 * d + 2])
        for d, count in enumerate(bins)
    ]


@row("aten::_histogramdd_from_bin_cts")
@refuse_like_torch
def histogramdd(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Equal bins along each coordinate."""
    if logical_rank(args[0], bdims[0]) < 2 or len(args[1]) != _coordinates(args[0], bdims[0]):
        return raise_as_one_example(op, bdims, args, kwargs)
    size = level.batch_size
    x = _as_points(args[0], bdims[0], size, 1)
    edges = _edges_of_all(x, args[1], kwargs.get("range"))
    weight = _weight(bdims, args, kwargs, size)
    return _histogram(x, edges, weight, kwargs.get("density", False)), 0


@row("aten::_histogramdd_from_bin_tensors")
@refuse_like_torch
def histogramdd_between(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Bins between given edges along each coordinate."""
    size = level.batch_size
    x = _as_points(args[0], bdims[0], size, 1)
    edge_bdims = bdims[1] or [None] * len(args[1])
    edges = batches_first(args[1], edge_bdims, size)
    weight = _weight(bdims, args, kwargs, size)
    return _histogram(x, edges, weight, kwargs.get("density", False)), 0


takes_keywords(
    ("aten::histogram.bin_ct", "aten::histogram.bins_tensor", "aten::_histogramdd_bin_edges",
     "aten::_histogramdd_from_bin_cts", "aten::_histogramdd_from_bin_tensors"),
    "weight",
)  # fmt: skip
