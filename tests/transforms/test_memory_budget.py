"""The free memory according to system files, which the tests make up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tsfunc.transforms import chunk_sizes
from tsfunc.transforms.chunk_sizes import _free_on_host, default_budget, free_bytes

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def free(root: Path) -> int:
    return _free_on_host(root / "proc", root / "groups")


MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 7 kB\nMemAvailable: {8 * GIB // 1024} kB\n"


def test_the_description_of_the_kernel(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert free(tmp_path) == 8 * GIB


def test_limits_of_a_container(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/some/group\n",
            "groups/some/group/memory.max": "max\n",
            "groups/some/group/memory.current": f"{GIB}\n",
            "groups/some/memory.max": f"{4 * GIB}\n",
            "groups/some/memory.current": f"{3 * GIB}\n",
            "groups/some/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert free(tmp_path) == 2 * GIB


def test_limits_of_groups_of_the_first_version(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/of/the/host\n0::/\n",
            "groups/memory/memory.limit_in_bytes": f"{5 * GIB}\n",
            "groups/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
        },
    )
    assert free(tmp_path) == 3 * GIB


def test_more_in_use_than_allowed_is_nothing_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "groups/memory.max": "10\n",
            "groups/memory.current": "20\n",
        },
    )
    assert free(tmp_path) == 0


def test_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free(tmp_path) == 4096000

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    with pytest.raises(RuntimeError, match="the call may take as memory_budget="):
        free(tmp_path)


def test_the_default_budget_is_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes(torch.device("cpu")) > 0
    monkeypatch.setattr(chunk_sizes, "free_bytes", lambda device: 1001)
    assert default_budget(torch.device("cpu")) == 500


def test_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory is the driver's, plus the memory that torch's allocator has reserved."""
    told = {"get_memory_info": (700, 1000), "memory_reserved": 200, "memory_allocated": 150}
    for name, value in told.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)
    assert free_bytes(torch.device("cuda", 0)) == 750
