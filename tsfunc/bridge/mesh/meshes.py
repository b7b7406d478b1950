"""Meshes: named axes whose indices are ranks, and the process group of each axis.

NOTE [meshes by text]
A program must be the same on every rank and may run in a process other than the one that made it. A
program therefore can't hold process groups, whose names are counters. Instead it holds the axis and
the mesh as texts (``"dp"``, ``"dp=2,tp=4"``). A process registers each mesh that it uses by its
text; a second mesh with the same text over other ranks is refused.

A mesh refers to its process groups weakly: torch owns them, and ``destroy_process_group`` has to
end their threads before the interpreter ends.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tsfunc.errors import MeshError


class Mesh:
    """Named axes over the ranks of process groups.

    Attributes:
        sizes: the number of ranks along each axis, by name, the outermost axis first.
        text: the names and sizes, in the form that programs contain.
        devices: for each axis, a device whose tensors its group can exchange.
        agreed: the programs, by axis and mark, that the ranks have agreed on.
        reports: the number of errors that this rank has reported.
        reported: the identity of the last of them; None if the rank has made an exchange since.
    """

    def __init__(self, groups: Mapping[str, Any]) -> None:
        self._groups = {name: weakref.ref(group) for name, group in groups.items()}
        self.sizes = {name: group.size() for name, group in groups.items()}
        self.ranks = {
            name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()
        }
        self.text = mesh_text(self.sizes)
        self.devices = {name: _device_of(group) for name, group in groups.items()}
        self.agreed: set[tuple[str, str]] = set()
        self.reports = 0
        self.reported: int | None = None

    def group(self, axis: str) -> Any:
        """Return the process group of an axis that contains this rank.

        Raises:
            MeshError: the group has been destroyed.
        """
        group = self._groups[axis]()
        if group is None:
            raise MeshError(
                f"mesh ({self.text}): expected process groups that exist, got an axis {axis!r} "
                f"whose group has been destroyed. Make a new mesh after init_process_group."
            )
        return group

    def has_groups(self, groups: Mapping[str, Any]) -> bool:
        """True if these are the mesh's axes and process groups, in the same order."""
        return list(self._groups) == list(groups) and all(
            self._groups[axis]() is group for axis, group in groups.items()
        )

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis."""
        return self.group(axis).rank()

    def has_programs(self, axis: str) -> bool:
        """True if the ranks have agreed on a program along the axis, which they may run now."""
        return any(agreed == axis for agreed, _ in self.agreed)


def _device_of(group: Any) -> torch.device:
    kinds = [kind.type for kind in group._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return names and sizes in the form that programs contain."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def split_check(mesh: str) -> tuple[str, str]:
    """Return a mesh's text and the check of an exchange, which follows it: ``"dp=2;values"``.

    The check is empty for an exchange without one.
    """
    text, _, check = mesh.partition(";")
    return text, check


@functools.lru_cache(maxsize=256)
def sizes_of(text: str) -> Mapping[str, int]:
    """Return the sizes by name from a mesh's text; a check after the text is ignored."""
    pairs = (part.rpartition("=") for part in split_check(text)[0].split(","))
    return {name: int(size) for name, _, size in pairs}


_registered: dict[str, Mesh] = {}


def registered_mesh(groups: Mapping[str, Any]) -> Mesh:
    """Return the mesh of the groups, registered so that programs can name it.

    Raises:
        MeshError: another mesh over other ranks has the same names and sizes.
    """
    for other in _registered.values():
        if other.has_groups(groups):
            return other
    mesh = Mesh(groups)
    registered = _registered.get(mesh.text)
    if registered is not None and registered.ranks != mesh.ranks and _has_live_groups(registered):
        raise MeshError(
            f"mesh ({mesh.text}): expected one mesh for these names and sizes in a process, got a "
            f"second one over the ranks {mesh.ranks}; the first is over {registered.ranks}. "
            f"Programs name a mesh by its axes and sizes: give the axes of one of the two other "
            f"names."
        )
    _registered[mesh.text] = mesh
    return mesh


def is_registered(mesh: Mesh) -> bool:
    """True if programs find this mesh by its text."""
    return _registered.get(mesh.text) is mesh


def _has_live_groups(mesh: Mesh) -> bool:
    """True if the mesh's groups have not been destroyed."""
    try:
        return all(dist.get_rank(mesh.group(axis)) >= 0 for axis in mesh.sizes)
    except (MeshError, ValueError, RuntimeError):
        return False


def mesh_named(text: str) -> Mesh:
    """Return the mesh of a text.

    Raises:
        MeshError: this process has no such mesh; the message lists the registered ones.
    """
    mesh = _registered.get(text)
    if mesh is None:
        others = "; ".join(_registered) or "none"
        raise MeshError(
            f"expected a process with a mesh of the axes {text}, over which this program runs, "
            f"got one with these meshes: {others}. Make a mesh with these names and sizes and "
            f"enter it with tsfunc.mesh_axes(mesh), or specialize the function again for the mesh "
            f"you have."
        )
    return mesh
