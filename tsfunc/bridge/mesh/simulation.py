"""One simulated rank of a large mesh in a single process, by torch's fake process group."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tsfunc.errors import MeshError
from tsfunc.user_code import folding


@folding("simulated_rank")
@contextmanager
def simulated_rank(rank: int = 0, **sizes: int) -> Iterator[DeviceMesh]:
    """Context manager: this process acts as one rank of a mesh of any size.

    Collectives return at once and move no data. Programs, shapes, memory and the counts of
    collectives (``explain``, ``program.properties().collectives``) are those of the rank; values
    that have passed through a collective are meaningless. For values, use
    :class:`tsfunc.VirtualMesh`.

    Args:
        rank: the rank to act as.
        sizes: the size of each axis by its name, the outermost axis first.

    Returns:
        The mesh, on the CPU.

    Raises:
        MeshError: the process already has a process group.

    Example:
        >>> import torch
        >>> from tsfunc import P, psum, shard_map, specialize
        >>> from tsfunc.testing import simulated_rank
        >>> with simulated_rank(17, dp=64, tp=16) as mesh:
        ...     total = shard_map(lambda x: psum(x, "dp"), mesh, P("dp"), P())
        ...     program = specialize(total).lower(torch.ones(128, 4))
        >>> program.properties().collectives
        (CollectiveUse(axis='dp', collective='psum', times=1, bytes=32),)
    """
    if dist.is_initialized():
        raise MeshError(
            "simulated_rank: expected a process without a process group, got one that has called "
            "torch.distributed.init_process_group. Call destroy_process_group first."
        )
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    world = 1
    for size in sizes.values():
        world *= size
    store: Any = vars(dist)["HashStore"]()
    dist.init_process_group("fake", rank=rank, world_size=world, store=store)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
