"""Levels of mesh axes: they bind a name and have no tracers.

The examples of a mesh axis are ranks, so each process has one example, as a plain tensor. Operators
run on it at torch's own speed; only collectives ask for the level (``level_named`` in
``bridge/control/collectives``). As a level it is captured by the levels inside of it and by
whatever runs the function again (checkpoints, rules of the user's in a backward pass).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tsfunc.bridge.mesh.meshes import Mesh
from tsfunc.bridge.mesh.operators import axis_index, mapped
from tsfunc.dispatch import DispatchKey, Level
from tsfunc.dispatch.state import tls, using


class MeshLevel(Level):
    """One axis of a mesh, bound to its name.

    Attributes:
        mesh: the mesh.
        axis_name: the axis.
        batch_size: how many ranks the axis has.
    """

    __slots__ = ("axis_name", "batch_size", "mesh")

    batch_size: int

    def __init__(self, mesh: Mesh, axis_name: str) -> None:
        super().__init__(DispatchKey.BackendSelect, f"mesh axis {axis_name!r}")
        self.mesh = mesh
        self.axis_name = axis_name
        self.batch_size = mesh.sizes[axis_name]

    def exchanged(self, kind: str, ints: Any, value: torch.Tensor) -> torch.Tensor:
        """Return a collective of a value (``operators`` has the kinds)."""
        return mapped(value, kind, list(ints), self.axis_name, self.mesh.text)

    def index(self, device: torch.device | None) -> torch.Tensor:
        """Return this rank's index along the axis."""
        return axis_index(self.axis_name, self.mesh.text, device)


def mesh_levels() -> list[MeshLevel]:
    """Return the active levels of mesh axes, the outermost first."""
    return [level for level in tls.state.levels if isinstance(level, MeshLevel)]


class MeshAxes:
    """The mesh axes that are bound where it is made, for code that runs later.

    A rule of the user's may run in a backward pass that begins after ``shard_map`` has returned.
    """

    def __init__(self) -> None:
        self.levels = mesh_levels()

    def bound(self) -> AbstractContextManager[None]:
        """Context manager: the axes are bound, where no active level binds them already."""
        state = tls.state
        here = {level.axis_name for level in mesh_levels()}
        again = [level for level in self.levels if level.axis_name not in here]
        # Their depths do not matter: they have no tracers, and no kernels.
        return using(state.with_levels((*again, *state.levels))) if again else nullcontext()
