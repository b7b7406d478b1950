"""Levels of mesh axes, which bind a name and have no tracers.

The examples of a mesh axis are ranks, so each process has one example, as a plain tensor. Operators
on it are plain torch calls; only collectives look up the level (``level_named`` in
``bridge/control/collectives``). Inner levels capture the level, and so does code that runs the
function again (checkpoints, the user's rules in a backward pass).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tsfunc.bridge.mesh.meshes import Mesh
from tsfunc.bridge.mesh.operators import axis_index, mapped
from tsfunc.bridge.trace.tracing import TraceLevel
from tsfunc.dispatch import DispatchKey, Level
from tsfunc.dispatch.state import tls, using


class _Observed(threading.local):
    """The axes over which values were exchanged on this thread, while ``observing``."""

    axes: set[str] | None = None


_observed = _Observed()


@contextmanager
def observing() -> Iterator[set[str]]:
    """Context manager: yields the set of axes over which the block exchanges values."""
    outer = _observed.axes
    seen: set[str] = set()
    _observed.axes = seen
    try:
        yield seen
    finally:
        _observed.axes = outer
        if outer is not None:
            outer |= seen


class MeshLevel(Level):
    """One axis of a mesh, bound to its name.

    Attributes:
        mesh: the mesh.
        axis_name: the axis.
        batch_size: the number of ranks along the axis.
        check: "calls", "values", None, or "programs", which is the same as "calls" outside of
            programs.
    """

    __slots__ = ("axis_name", "batch_size", "binding", "check", "mesh")

    batch_size: int

    def __init__(self, mesh: Mesh, axis_name: str, check: str | None = "programs") -> None:
        super().__init__(DispatchKey.BackendSelect, f"mesh axis {axis_name!r}")
        self.mesh = mesh
        self.axis_name = axis_name
        self.batch_size = mesh.sizes[axis_name]
        self.check = check
        self.binding = f"{axis_name} of {mesh.text}, check={check}"

    def exchanged(self, kind: str, ints: Any, value: torch.Tensor) -> torch.Tensor:
        """Return a collective of a value (``operators`` has the kinds)."""
        if _observed.axes is not None:
            _observed.axes.add(self.axis_name)
        mesh = self.mesh.text
        if self.check is None:
            mesh += ";unchecked"
        elif self.checks_calls:
            mesh += ";values" if self.check == "values" else ";calls"
        return mapped(value, kind, list(ints), self.axis_name, mesh)

    @property
    def checks_calls(self) -> bool:
        """True if ranks agree before each collective: NOTE [agreements] in ``agreement``."""
        if self.check != "programs":
            return self.check is not None
        return not in_trace()

    def index(self, device: torch.device | None) -> torch.Tensor:
        """Return this rank's index along the axis."""
        return axis_index(self.axis_name, self.mesh.text, device)


def in_trace() -> bool:
    """True if a program is being traced, whose exchanges run later."""
    return any(isinstance(level, TraceLevel) for level in tls.state.levels)


def mesh_levels() -> list[MeshLevel]:
    """Return the active levels of mesh axes, the outermost first."""
    return [level for level in tls.state.levels if isinstance(level, MeshLevel)]


class MeshAxes:
    """The mesh axes that are bound when it is made, for code that runs later.

    A user's rule may run in a backward pass that begins after ``shard_map`` has returned.
    """

    def __init__(self) -> None:
        self.levels = mesh_levels()

    def bound(self) -> AbstractContextManager[None]:
        """Context manager: binds the axes that no active level binds already."""
        state = tls.state
        here = {level.axis_name for level in mesh_levels()}
        again = [level for level in self.levels if level.axis_name not in here]
        # Their depths do not matter: they have no tracers, and no kernels.
        return using(state.with_levels((*again, *state.levels))) if again else nullcontext()
