"""Measures the memory that a block of code takes, from the reports of the allocators.

On an accelerator, torch counts allocations; the peak is reset for the measurement. On the CPU, the
allocator reports each allocation and release only to torch's profiler. The measurement therefore
runs the profiler in its legacy form, which only keeps a list of events.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from tsfunc.bridge.tracers.interrupts import undoing


class Meter:
    """Context manager that measures the additional memory that its block takes on a device.

    On the CPU it counts allocations of this thread, and of backward passes that the thread starts.
    Releases of memory from before the block are not part of the result.

    Attributes:
        peak: the largest number of bytes in use at once.
        held: the number of bytes in use at the end.

    Raises:
        RuntimeError: a profiler runs on this thread already, so no second one can start.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0
        self.held = 0
        self._undoing = undoing(functools.partial(_running.stop, self))

    def __enter__(self) -> Meter:
        if self.device.type == "cpu":
            self._undoing.__enter__()
            _running.start(self)
        else:
            torch.accelerator.reset_peak_memory_stats(self.device)
            self._before = torch.accelerator.memory_allocated(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cpu":
            self._undoing.__exit__()
        else:
            accelerator = torch.accelerator
            self.peak = accelerator.max_memory_allocated(self.device) - self._before
            self.held = accelerator.memory_allocated(self.device) - self._before

    def count(self, size: int) -> None:
        """Count an allocation, or for a negative size a release."""
        self.held += size
        self.peak = max(self.peak, self.held)


class _RunningMeters(threading.local):
    """The meters of a thread; they share one profiler, read when a meter starts or stops."""

    def __init__(self) -> None:
        self.meters: list[Meter] = []

    def start(self, meter: Meter) -> None:
        if self.meters:
            self._stop_profiler()
        elif _profiler_enabled():
            raise RuntimeError(
                "vmap with chunk_size='auto' measures memory by torch's profiler, but a profiler "
                "runs on this thread already. Give chunk_size as a number, or make one call "
                "outside of the profiler first: what it measures is kept."
            )
        self.meters.append(meter)
        _start_profiler()

    def stop(self, meter: Meter) -> None:
        """Stop a meter; it may be called again if it was interrupted, or before the start."""
        if meter not in self.meters:
            return
        if _profiler_enabled():
            self._stop_profiler()
        if len(self.meters) > 1:
            _start_profiler()
        self.meters.remove(meter)

    def _stop_profiler(self) -> None:
        """Stop the profiler, and give its events to the meters."""
        event: Any  # kind is annotated as an int, but is a name
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


_running = _RunningMeters()
