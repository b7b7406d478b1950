"""How much memory a piece of work takes, by the allocators' own reports.

On an accelerator torch keeps count; its peak is reset for the measurement. On the CPU the
allocator reports each block that it gives or takes back to torch's profiler alone, so that is what
runs, in its oldest form, which keeps a list of events and does nothing else.

Private names used here (torch 2.11 to 2.13): ``_C._autograd._enable_profiler_legacy`` and
``_disable_profiler_legacy`` start the profiler on this thread and return what it saw, a list of
events a thread; ``_profiler_enabled`` says whether one runs; ``_C._profiler`` has the types of
its settings.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig


class Meter:
    """Context manager: what the block takes on a device, beyond what was in use before it.

    On the CPU it counts what this thread allocates, and backward passes that it starts. What was
    there before and is given back in the block makes no difference.

    Attributes:
        peak: the most bytes in use at once.
        held: the bytes that were still in use at the end.

    Raises:
        RuntimeError: a profiler runs on this thread already, beside which none can be started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0
        self.held = 0

    def __enter__(self) -> Meter:
        if self.device.type == "cpu":
            _running.start(self)
        else:
            torch.accelerator.reset_peak_memory_stats(self.device)
            self._before = torch.accelerator.memory_allocated(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cpu":
            _running.stop(self)
        else:
            accelerator = torch.accelerator
            self.peak = accelerator.max_memory_allocated(self.device) - self._before
            self.held = accelerator.memory_allocated(self.device) - self._before

    def count(self, size: int) -> None:
        """A block of memory was given out, or for a negative size taken back."""
        self.held += size
        self.peak = max(self.peak, self.held)


class _Running(threading.local):
    """The meters of a thread. One profiler serves all: it is read where one comes or goes."""

    def __init__(self) -> None:
        self.meters: list[Meter] = []

    def start(self, meter: Meter) -> None:
        if self.meters:
            self._read()
        elif _profiler_enabled():
            raise RuntimeError(
                "vmap with chunk_size='auto' measures memory by torch's profiler, but a profiler "
                "runs on this thread already. Give chunk_size as a number, or make one call "
                "outside of the profiler first: what it measures is kept."
            )
        self.meters.append(meter)
        _start_profiler()

    def stop(self, meter: Meter) -> None:
        self._read()
        self.meters.remove(meter)
        if self.meters:
            _start_profiler()

    def _read(self) -> None:
        """Stops the profiler, and tells the meters what it saw."""
        event: Any  # its kind is declared an int, and is a name
        for events in _disable_profiler_legacy():
            for event in events:
                if event.kind() == "memory_alloc":
                    size = event.cpu_memory_usage()
                    for meter in self.meters:
                        meter.count(size)


def _start_profiler() -> None:
    no, memory = False, True
    settings: Any = ProfilerConfig(ProfilerState.CPU, no, memory, no, no, no, _ExperimentalConfig())
    _enable_profiler_legacy(settings)


_running = _Running()
