"""Linear maps between a batch and its active subsets: NOTE [active subsets] in ``subsets``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tsfunc.bridge.grad.linear_maps import LinearMap, at_level, batched_value, linear, rebuilt
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel

if TYPE_CHECKING:
    from tsfunc.bridge.control.subsets import SubsetLevel


class Select(LinearMap):
    """Selects the subset's part of a tensor of the whole batch."""

    def __init__(self, subset: SubsetLevel) -> None:
        self.subset = subset
        self.source: BatchLevel | None = None

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        subset = self.subset
        level = value.dispatch_level
        with level.restored():
            if level.depth > subset.depth:
                inner = value.value
                if isinstance(inner, Tracer) and inner.dispatch_level.depth >= subset.depth:
                    return rebuilt(value, linear(self, (inner,)))
                self.source = subset.whole
                return rebuilt(value, wrap(inner, None, subset))
            self.source = level
            return subset.physical(value.value, value.bdim, level)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        assert self.source is not None
        return (scatter(cotangent, self.subset, self.source),)


class _Scatter(LinearMap):
    """Puts a tensor of the subset into the whole batch, with zeros for the other examples."""

    def __init__(self, subset: SubsetLevel, target: BatchLevel) -> None:
        self.subset, self.target = subset, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        subset, target = self.subset, self.target
        level = value.dispatch_level
        with level.restored():
            if level.depth > subset.depth:
                return rebuilt(value, linear(self, (at_level(value.value, subset),)))
            inner, dim = batched_value(value, subset)
            shape = list(inner.shape)
            shape[dim] = target.batch_size
            zeros = inner.new_zeros(shape)
            return wrap(zeros.index_add(dim, subset.index_in(target), inner), dim, target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (self.subset.remap(cotangent),)


def scatter(value: Any, subset: SubsetLevel, target: BatchLevel) -> Any:
    """Return a tensor of an ancestor: the subset's values, and zeros for other examples."""
    return linear(_Scatter(subset, target), (at_level(value, subset),))


class Merge(LinearMap):
    """Merges tensors of subsets that partition the batch."""

    def __init__(self, parts: Sequence[SubsetLevel], target: BatchLevel) -> None:
        self.parts, self.target = parts, target

    @functools.cached_property
    def order(self) -> torch.Tensor:
        """For each example of the whole batch, its position in the concatenated parts."""
        return torch.cat([part.index_in(self.target) for part in self.parts]).argsort()

    def of(self, values: Sequence[Any]) -> Any:
        """Return one tensor of the whole batch from a tensor of each part."""
        lifted = [at_level(part.remap(v), part) for v, part in zip(values, self.parts, strict=True)]
        inmost = max((v.dispatch_level for v in lifted), key=lambda level: level.depth)
        if inmost.depth > self.target.depth:
            lifted = [
                v
                if v.dispatch_level.depth == inmost.depth
                else at_level(inmost.lift(v), self.target)
                for v in lifted
            ]
        return linear(self, lifted)

    def run(self, values: Sequence[Any]) -> Any:
        level = max((v.dispatch_level for v in values), key=lambda level: level.depth)
        with level.restored():
            if level.depth > self.target.depth:
                return self._inside(level, values)
            pairs = [batched_value(v, part) for v, part in zip(values, self.parts, strict=True)]
            dim = pairs[0][1]
            inner = [v if at == dim else v.movedim(at, dim) for v, at in pairs]
            return wrap(torch.cat(inner, dim).index_select(dim, self.order), dim, self.target)

    def _inside(self, level: TracerLevel, values: Sequence[Any]) -> Any:
        """Merge at a level inside of the subsets, by the values that its tracers wrap."""
        lifted: list[Any] = [
            v if v.dispatch_level.depth == level.depth else level.lift(v) for v in values
        ]
        batched = isinstance(level, BatchLevel) and any(v.bdim is not None for v in lifted)
        if not batched:
            inner = [v.value for v in lifted]
        else:
            assert isinstance(level, BatchLevel)
            pairs = [batched_value(v, v.dispatch_level) for v in lifted]
            inner = [v.movedim(at, 0) for v, at in pairs]
        inner = [at_level(v, part) for v, part in zip(inner, self.parts, strict=True)]
        merged = linear(self, inner)
        if isinstance(level, BatchLevel):
            return wrap(merged, 0 if batched else None, level)
        return level.lift(merged)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return tuple(part.remap(cotangent) for part in self.parts)


class _Relabel(LinearMap):
    """Relabels a tensor as one of another level with the same number of examples."""

    def __init__(self, source: BatchLevel, target: BatchLevel) -> None:
        self.source, self.target = source, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level = value.dispatch_level
        if level.depth > self.target.depth:
            with level.restored():
                return rebuilt(value, linear(self, (at_level(value.value, self.source),)))
        return wrap(value.value, value.bdim, self.target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (relabel(cotangent, self.target, self.source),)


def relabel(value: Any, source: BatchLevel, target: BatchLevel) -> Any:
    """Return a value of a guarded subset as one of the whole batch; they have equal sizes."""
    if not isinstance(value, Tracer) or value.dispatch_level.depth < source.depth:
        return value
    return linear(_Relabel(source, target), (value,))
