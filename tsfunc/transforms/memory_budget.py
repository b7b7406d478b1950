"""The free memory of a device, and the share of it that a chunked ``vmap`` takes by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

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
                taken = int((folder / used).read_text())
            except OSError:
                continue
            if most != "max":
                yield int(most) - taken + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files that count as used and are freed on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split() for line in lines)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))
