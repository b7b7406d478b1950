"""How much memory a device has free, and what share of it a chunked ``vmap`` takes by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

SHARE = 0.5  # of what is free; the rest is for what the caller does with the results


def default_budget(device: torch.device) -> int:
    """The bytes that a call may take on a device when nobody says how many."""
    return int(SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """The bytes that can be had on a device now.

    Raises:
        RuntimeError: it can't be found out here.
    """
    if device.type == "cpu":
        return _free_on_host()
    free, _ = torch.accelerator.get_memory_info(device)
    # What torch's allocator keeps for itself is free for tensors as well.
    allocator = torch.accelerator
    kept = allocator.memory_reserved(device) - allocator.memory_allocated(device)
    return int(free) + kept


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
    """All of it, where the system does not tell what is free."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise RuntimeError(
            "vmap with chunk_size='auto': this system does not tell how much memory is free. Say "
            "how much the call may take with memory_budget=."
        ) from None


def _free_in_groups(proc: Path, root: Path) -> Iterator[int]:
    """What is left of the limits of the control groups that this process is in (containers)."""
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        number, controllers, path = membership.split(":", 2)
        if number == "0":  # the second version: one tree for all
            top, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        # Inside of a container the path can be that of the host, of which only the top is seen.
        for folder in {group, *(up for up in group.parents if top in (up, *up.parents))}:
            try:
                most = (folder / limit).read_text().strip()
                taken = int((folder / used).read_text())
            except OSError:
                continue
            if most != "max":
                yield int(most) - taken + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """File contents that a group's use counts and that go when memory is needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split() for line in lines)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))
