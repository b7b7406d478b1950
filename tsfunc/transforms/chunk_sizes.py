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

import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from tsfunc.bridge.sizes.shape_environment import count_of
from tsfunc.bridge.tracers.memory_meter import Meter
from tsfunc.errors import MemoryBudgetWarning
from tsfunc.user_code import warn

GROWTH = 8  # the most by which measured chunks grow
MARGIN = 0.9  # part of the budget to use: allocators round up, libraries keep buffers


class ChunkSizes(Protocol):
    """Source of the sizes of the chunks of one call."""

    def lengths(self, size: int) -> Iterator[int]:
        """Return the sizes of the chunks of ``size`` examples; each is read when it is its turn."""

    def running(self, examples: int) -> AbstractContextManager[Any]:
        """Context manager for the run of a chunk."""

    def keep(self, examples: int, size: int) -> None:
        """Note that ``size`` bytes of the results so far are copied once more at the end."""


class FixedSize:
    """Chunks of one size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def count(self, size: int) -> int:
        """Return the number of chunks; in a trace it is the one constraint on a named size."""
        return count_of(-(-size // self.size))

    def lengths(self, size: int) -> Iterator[int]:
        whole = self.count(size) - 1
        yield from itertools.repeat(self.size, whole)
        if whole >= 0:
            yield size - whole * self.size

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

    def lengths(self, size: int) -> Iterator[int]:
        while size > 0:
            length = min(self._next(), size)
            yield length
            size -= length

    def _next(self) -> int:
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
            f"vmap({self.name}, chunk_size='auto'): the memory budget of "
            f"{_bytes_text(self.budget)} is too small: one example at a time takes "
            f"{_bytes_text(model.peak(1))} at its peak, "
            f"and the {self.total} examples leave {_bytes_text(self.total * model.held)} in use "
            f"together (results, and values saved for a backward pass). They are run one at a "
            f"time. Give a larger memory_budget=, or a smaller batch.",
            MemoryBudgetWarning,
        )


def _bytes_text(size: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


# --- the free memory of a device, and the share of it that a call takes by default


SHARE = 0.5  # of the free memory; the caller needs the rest for the results


def default_budget(device: torch.device) -> int:
    """Return the bytes that a call may take on a device by default."""
    return int(SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device.

    Raises:
        RuntimeError: the system does not report them.
    """
    if device.type == "cpu":
        return _free_on_host()
    free, _ = torch.accelerator.get_memory_info(device)
    # Memory that torch's allocator reserves without use is free for tensors too.
    allocator = torch.accelerator
    reserved = allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return int(free) + reserved


def _free_on_host(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    limits = list(_free_in_groups(proc, cgroups))
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                limits.append(int(rest.split()[0]) * 1024)
    except OSError:
        limits.append(_physical_memory())
    return max(min(limits), 0)


def _physical_memory() -> int:
    """Return the physical memory, for systems that do not report free memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise RuntimeError(
            "vmap with chunk_size='auto': this system does not report its free memory. Pass the "
            "number of bytes that the call may take as memory_budget=."
        ) from None


def _free_in_groups(proc: Path, root: Path) -> Iterator[int]:
    """Yield the rest of each memory limit of this process' control groups (containers)."""
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        number, controllers, path = membership.split(":", 2)
        if number == "0":  # cgroup version 2: one tree for all controllers
            top, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        # In a container the path can be the host's, and only the top folder may be visible.
        for folder in {group, *(up for up in group.parents if top in (up, *up.parents))}:
            try:
                most = (folder / limit).read_text().strip()
                in_use = int((folder / used).read_text())
            except OSError:
                continue
            if most != "max":
                yield int(most) - in_use + _reclaimable_bytes(folder)


def _reclaimable_bytes(folder: Path) -> int:
    """Return the bytes of cached files that count as used and are freed on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split() for line in lines)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))
