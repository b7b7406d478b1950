"""The number of examples of a chunk: a fixed number, or as many as fit into a memory budget.

NOTE [chunks by memory]
The peak memory of a chunk of ``k`` examples is modelled as ``fixed + per_example * k``: a part that
does not depend on the batch, and the part of each example. Two chunks of different sizes determine
both; after one chunk the whole peak counts as ``per_example``, which is the safe side. The first
chunk has one example, and each measured chunk is at most eight times as large as the one before, so
that a wrong estimate shows before it does harm. The memory that a chunk leaves in use (results, and
values that autograd saves for a backward pass) stays in use for all examples, so it is subtracted
from the budget first. The model is kept for later calls with such inputs, of any batch size, which
then measure nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from tsfunc.bridge.tracers.memory_meter import Meter
from tsfunc.errors import MemoryBudgetWarning
from tsfunc.user_code import warn

GROWTH = 8  # the most by which measured chunks grow
MARGIN = 0.9  # part of the budget to use: allocators round up, libraries keep buffers


class ChunkSizes(Protocol):
    """Source of the sizes of the chunks of one call."""

    def next(self) -> int:
        """Return the size of the next chunk."""

    def running(self, examples: int) -> AbstractContextManager[Any]:
        """Context manager for the run of a chunk."""

    def keep(self, examples: int, size: int) -> None:
        """Note that ``size`` bytes of the results so far are copied once more at the end."""


class FixedSize:
    """Chunks of one size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def next(self) -> int:
        return self.size

    def running(self, examples: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def keep(self, examples: int, size: int) -> None:
        pass


class MemoryModel:
    """Model of the memory that chunks of a function use (NOTE [chunks by memory]).

    Attributes:
        fixed: bytes of a chunk of any size.
        per_example: bytes that an example adds to the peak.
        held: bytes that an example leaves in use.
        copied: bytes of an example that are in use twice when results are put together.
    """

    def __init__(self) -> None:
        self.fixed = self.per_example = self.held = self.copied = 0.0
        self._seen: dict[int, int] = {}

    @property
    def is_measured(self) -> bool:
        """True if a chunk was measured."""
        return bool(self._seen)

    def observe(self, examples: int, peak: int, held: int) -> None:
        """Update the model with the measurement of a chunk."""
        self._seen[examples] = max(peak, self._seen.get(examples, 0))
        self.held = max(held, 0) / examples
        *smaller, largest = sorted(self._seen)
        most = self._seen[largest]
        self.fixed, self.per_example = 0.0, most / largest
        if smaller:
            other = smaller[-1]
            slope = (most - self._seen[other]) / (largest - other)
            # An example takes at least the memory that it leaves in use, and at most its share.
            self.per_example = min(max(slope, self.held), most / largest)
            self.fixed = most - self.per_example * largest

    def peak(self, examples: int) -> float:
        """Return the expected peak memory of a chunk."""
        return self.fixed + self.per_example * examples

    def largest(self, budget: float, total: int) -> int:
        """Return the largest size of chunks that keep a budget; 0 if one example exceeds it."""
        room = MARGIN * budget - total * self.held - self.fixed
        if room < self.per_example or total * (self.held + self.copied) > budget:
            return 0
        return total if self.per_example == 0 else min(total, int(room / self.per_example))


class MeasuredSize:
    """Source of chunk sizes that fit into a memory budget.

    Args:
        model: the memory model of such calls; updated while it is new.
        budget: bytes that the call may use in addition to its inputs.
        device: the device whose memory is measured.
        name: the name of the function in messages.
    """

    def __init__(
        self, model: MemoryModel, budget: int, total: int, device: torch.device, name: str
    ) -> None:
        self.model, self.budget, self.total = model, budget, total
        self.device, self.name = device, name
        self._measures = not model.is_measured
        self._last = 0
        self._warned = False

    def next(self) -> int:
        if not self.model.is_measured:
            return 1
        size = self.model.largest(self.budget, self.total)
        if size == 0:
            self._warn()
        if self._measures:
            size = min(size, GROWTH * self._last)
        return max(size, 1)

    @contextmanager
    def running(self, examples: int) -> Iterator[None]:
        if not self._measures:
            yield
            return
        with Meter(self.device) as meter:
            yield
        self.model.observe(examples, meter.peak, meter.held)
        self._last = examples

    def keep(self, examples: int, size: int) -> None:
        self.model.copied = size / examples

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        model = self.model
        warn(
            f"vmap({self.name}, chunk_size='auto'): the memory budget of {_readable(self.budget)} "
            f"is too small: one example at a time takes {_readable(model.peak(1))} at its peak, "
            f"and the {self.total} examples leave {_readable(self.total * model.held)} in use "
            f"together (results, and values saved for a backward pass). They are run one at a "
            f"time. Give a larger memory_budget=, or a smaller batch.",
            MemoryBudgetWarning,
        )


def _readable(size: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
