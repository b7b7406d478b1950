"""The tracers around a value: which levels batch it, and at which dims of its physical value.

A tracer of one level can wrap a tracer of a level further out. Its batch dim is a dim of the value
that it wraps, which does not count the batch dims of the levels further out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.nesting import innermost_value, nested_tracers
from tsfunc.bridge.tracers.tracer import TracerLevel


@dataclass(frozen=True)
class Frame:
    """One tracer around a value: its level, and its batch dim if it has one."""

    level: TracerLevel
    bdim: int | None


@dataclass(frozen=True)
class TracerStack:
    """The tracers around a value, the innermost level first."""

    frames: tuple[Frame, ...] = ()

    @property
    def batch_levels(self) -> list[BatchLevel]:
        """The levels that batch the value, the outermost first."""
        return [level for level, _ in self._batches()]

    def dim_at(self, depth: int) -> int | None:
        """Return the batch dim of the tracer at a depth; None if there is none."""
        return next((frame.bdim for frame in self.frames if frame.level.depth == depth), None)

    def batch_dims_first(self, value: torch.Tensor) -> torch.Tensor:
        """Return a physical value with its batch dims in front, ordered as ``batch_levels``."""
        for i, (_, bdim) in enumerate(self._batches()):
            value = value.movedim(bdim + i, i)
        return value

    def _batches(self) -> list[tuple[BatchLevel, int]]:
        return [
            (frame.level, frame.bdim)
            for frame in reversed(self.frames)
            if isinstance(frame.level, BatchLevel) and frame.bdim is not None
        ]

    def wrap(self, value: torch.Tensor) -> torch.Tensor:
        for frame in reversed(self.frames):
            if isinstance(frame.level, BatchLevel):
                value = wrap(value, frame.bdim, frame.level)
            else:
                value = frame.level.lift(value)
        return value

    def shifted_by(self, dims: int) -> TracerStack:
        """Return the layout of physical values with more dims in front."""
        return TracerStack(
            tuple(
                Frame(frame.level, None if frame.bdim is None else frame.bdim + dims)
                for frame in self.frames
            )
        )


def unwrap_all(value: Any) -> tuple[Any, TracerStack]:
    """Return the innermost value of a tracer, and the tracers around it."""
    kinds = BatchTracer | GradTracer
    frames = [
        Frame(tracer.dispatch_level, getattr(tracer, "bdim", None))
        for tracer in nested_tracers(value, kinds)
    ]
    return innermost_value(value, kinds), TracerStack(tuple(frames))


def stack_of(frames: Mapping[int, Frame]) -> TracerStack:
    """Return the stack of the tracers at some depths."""
    return TracerStack(tuple(frame for _, frame in sorted(frames.items(), reverse=True)))
