"""How many examples a chunk has: a number, or what fits into a memory budget.

NOTE [chunks by memory]
What a chunk of ``k`` examples has in use at its peak is taken for ``fixed + each * k``: what does
not depend on the batch, and what each example adds. Two chunks of different sizes tell both, one
alone is taken for all ``each``, which is on the safe side. The first chunk has one example, and
chunks grow eightfold at most while they are measured, so that a wrong guess is seen before it
matters. What a chunk leaves behind (results, and what autograd saves for a backward pass) stays for
all examples, so it is taken off the budget first. What was found is kept for the next call with
such inputs, of whichever batch size, which then measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from tsfunc.bridge.tracers.memory import Meter
from tsfunc.dispatch.places import warn
from tsfunc.errors import MemoryBudgetWarning

GROWTH = 8  # of measured chunks
MARGIN = 0.9  # of the budget that is planned for: allocators round up, libraries keep buffers


class ChunkSizes(Protocol):
    """Says how many examples come next."""

    def next(self) -> int:
        """The size of the next chunk."""

    def running(self, examples: int) -> AbstractContextManager[Any]:
        """Context manager around the run of a chunk."""

    def keep(self, examples: int, size: int) -> None:
        """Of the results so far that many bytes are to be copied at the end once more."""


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
    """What chunks of a function were seen to take (NOTE [chunks by memory]).

    Attributes:
        fixed: bytes that a chunk takes whatever its size.
        each: bytes that an example adds to the peak.
        held: bytes that an example leaves in use.
        copied: bytes of an example that are in use twice when results are put together.
    """

    def __init__(self) -> None:
        self.fixed = self.each = self.held = self.copied = 0.0
        self._seen: dict[int, int] = {}

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._seen)

    def observe(self, examples: int, peak: int, held: int) -> None:
        """A chunk of that many examples was run."""
        self._seen[examples] = max(peak, self._seen.get(examples, 0))
        self.held = max(held, 0) / examples
        *smaller, largest = sorted(self._seen)
        most = self._seen[largest]
        self.fixed, self.each = 0.0, most / largest
        if smaller:
            other = smaller[-1]
            slope = (most - self._seen[other]) / (largest - other)
            # An example takes what it leaves at least, and no more than its share.
            self.each = min(max(slope, self.held), most / largest)
            self.fixed = most - self.each * largest

    def peak(self, examples: int) -> float:
        """What a chunk of that many examples is expected to take."""
        return self.fixed + self.each * examples

    def largest(self, budget: float, total: int) -> int:
        """The size of chunks of a batch that stay within a budget; 0 where not even 1 does."""
        room = MARGIN * budget - total * self.held - self.fixed
        if room < self.each or total * (self.held + self.copied) > budget:
            return 0
        return total if self.each == 0 else min(total, int(room / self.each))


class MeasuredSize:
    """Chunks that fit into a memory budget.

    Args:
        model: what is known of such calls; grows while it is new.
        budget: bytes that the call may have in use beside its inputs.
        total: how many examples there are.
        device: where the memory is counted.
        name: how messages call the function.
    """

    def __init__(
        self, model: MemoryModel, budget: int, total: int, device: torch.device, name: str
    ) -> None:
        self.model, self.budget, self.total = model, budget, total
        self.device, self.name = device, name
        self._measures = not model.known
        self._last = 0
        self._warned = False

    def next(self) -> int:
        if not self.model.known:
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
            f"together (results, and what a backward pass needs). They are run one at a time. "
            f"Give a larger memory_budget=, or a smaller batch.",
            MemoryBudgetWarning,
        )


def _readable(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
