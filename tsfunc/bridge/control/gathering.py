"""A batch's tensors at some of its examples, and these at the batch: NOTE [lanes] in ``lanes``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tsfunc.bridge.grad.linear_maps import LinearMap, at_level, batched_value, linear, rebuilt
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel

if TYPE_CHECKING:
    from tsfunc.bridge.control.lanes import LaneLevel


class Into(LinearMap):
    """The whole's tensor at the lanes."""

    def __init__(self, lanes: LaneLevel) -> None:
        self.lanes = lanes
        self.source: BatchLevel | None = None

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        lanes = self.lanes
        level = value.dispatch_level
        with level.restored():
            if level.depth > lanes.depth:
                inner = value.value
                if isinstance(inner, Tracer) and inner.dispatch_level.depth >= lanes.depth:
                    return rebuilt(value, linear(self, (inner,)))
                self.source = lanes.whole
                return rebuilt(value, wrap(inner, None, lanes))
            self.source = level
            return lanes.physical(value.value, value.bdim, level)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        assert self.source is not None
        return (spread(cotangent, self.lanes, self.source),)


class _Spread(LinearMap):
    """The lanes' tensor at the whole, with zeros for the other examples."""

    def __init__(self, lanes: LaneLevel, target: BatchLevel) -> None:
        self.lanes, self.target = lanes, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        lanes, target = self.lanes, self.target
        level = value.dispatch_level
        with level.restored():
            if level.depth > lanes.depth:
                return rebuilt(value, linear(self, (at_level(value.value, lanes),)))
            inner, dim = batched_value(value, lanes)
            shape = list(inner.shape)
            shape[dim] = target.batch_size
            zeros = inner.new_zeros(shape)
            return wrap(zeros.index_add(dim, lanes.index_in(target), inner), dim, target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (self.lanes.into(cotangent),)


def spread(value: Any, lanes: LaneLevel, target: BatchLevel) -> Any:
    """A tensor of the lanes among zeros for the other examples of a level they come from."""
    return linear(_Spread(lanes, target), (at_level(value, lanes),))


class Merge(LinearMap):
    """Parts of a batch put together: each with its lanes, every example in one of them."""

    def __init__(self, parts: Sequence[LaneLevel], target: BatchLevel) -> None:
        self.parts, self.target = parts, target

    @functools.cached_property
    def order(self) -> torch.Tensor:
        """Where each example of the whole is among those of the parts, one after the other."""
        return torch.cat([part.index_in(self.target) for part in self.parts]).argsort()

    def of(self, values: Sequence[Any]) -> Any:
        """What each of the parts gave, as one tensor of the whole."""
        lifted = [at_level(part.into(v), part) for v, part in zip(values, self.parts, strict=True)]
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
        """At a level inside of the lanes': the values inside of its tracers, put together."""
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
        return tuple(part.into(cotangent) for part in self.parts)


class _Retag(LinearMap):
    """The same examples, called another level's: lanes of the whole's size, one for each."""

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
        return (retag(cotangent, self.target, self.source),)


def retag(value: Any, source: BatchLevel, target: BatchLevel) -> Any:
    """Lanes that stand for every example of the whole, each in its place, as the whole."""
    if not isinstance(value, Tracer) or value.dispatch_level.depth < source.depth:
        return value
    return linear(_Retag(source, target), (value,))
