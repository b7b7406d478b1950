"""Levels of mesh axes, which bind a name and have no tracers.

The examples of a mesh axis are ranks, so each process has one example, as a plain tensor. Operators
on it are plain torch calls; only collectives look up the level (``level_named`` in
``bridge/control/axis_collectives``). Inner levels capture the level, and so does code that runs the
function again (checkpoints, the user's rules in a backward pass).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tsfunc.bridge.mesh.agreement import await_agreement
from tsfunc.bridge.mesh.exchanges import exchange_over
from tsfunc.bridge.mesh.mesh_operators import (
    axis_index,
    exchange_at_levels,
    in_trace,
    is_plain_exchange,
)
from tsfunc.bridge.mesh.meshes import Mesh
from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.dispatch import DispatchKey, Level
from tsfunc.dispatch.state import overriding, tls, using


class _Observed(threading.local):
    """The axes over which values were exchanged on this thread, in a block of ``observe_axes``."""

    axes: set[str] | None = None


_observed = resets(_Observed())


@contextmanager
def observe_axes() -> Iterator[set[str]]:
    """Context manager: yields the set of axes over which the block exchanges values."""
    outer, seen = _observed.axes, set[str]()
    try:
        with overriding(_observed, axes=seen):
            yield seen
    finally:
        if outer is not None:
            outer |= seen


class MeshLevel(Level):
    """One axis of a mesh, bound to its name.

    Attributes:
        batch_size: the number of ranks along the axis.
        check: "calls", "values", None, or "programs", which is the same as "calls" outside of
            programs.
        forbids_random: True if random operators in the body raise an error.
        has_boundary: True if values are converted where the body begins and ends (``shard_map``).
    """

    __slots__ = (
        "axis_name", "batch_size", "binding", "check", "forbids_random", "has_boundary", "mesh"
    )  # fmt: skip

    batch_size: int

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str,
        check: str | None = "programs",
        forbids_random: bool = False,
        has_boundary: bool = False,
    ) -> None:
        super().__init__(DispatchKey.BackendSelect, f"mesh axis {axis_name!r}")
        self.has_boundary = has_boundary
        self.forbids_random = forbids_random
        self.mesh = mesh
        self.axis_name = axis_name
        self.batch_size = mesh.sizes[axis_name]
        self.check = check
        self.binding = f"{axis_name} of {mesh.text}, check={check}"

    def exchange(self, kind: str, ints: Any, value: torch.Tensor) -> torch.Tensor:
        """Return a collective of a value (``mesh_operators`` has the kinds)."""
        if _observed.axes is not None:
            _observed.axes.add(self.axis_name)
        if is_plain_exchange(value):
            check = self.check_of_calls(traced=False)
            return exchange_over(self.mesh, check, value, kind, ints, self.axis_name)
        check = self.check_of_calls(in_trace())
        text = f"{self.mesh.text};{check}" if check else self.mesh.text
        return exchange_at_levels(value, kind, list(ints), self.axis_name, text)

    def check_of_calls(self, traced: bool) -> str:
        """Return the check of a collective, as exchanges have it.

        Args:
            traced: True if the collective is being recorded in a program.

        Returns:
            "calls" or "values" if the ranks agree before each collective (NOTE [agreements] in
            ``agreement``), "unchecked", or an empty string for a collective that gets the mark of
            its program.
        """
        check = self.check
        if check == "programs":
            return "" if traced else "calls"
        return check or "unchecked"

    def index(self, device: torch.device | None) -> torch.Tensor:
        """Return this rank's index along the axis."""
        return axis_index(self.axis_name, self.mesh.text, device)


def cross_boundary(levels: Sequence[MeshLevel], kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return a value that all ranks along the axes have, as one per rank or as one of all.

    Args:
        kind: "enter" or "leave".
    """
    if (
        all(level.check != "values" for level in levels)
        and _observed.axes is None
        and is_plain_exchange(x)
    ):
        return x.clone(memory_format=torch.contiguous_format)
    for level in levels:
        x = level.exchange(kind, (), x)
    return x


def agree_on_generators(levels: Sequence[MeshLevel]) -> None:
    """Return after the ranks have compared the states of torch's generators, if calls are checked.

    Raises:
        RanksDisagree: the states differ, so the ranks would draw unrelated numbers.
    """
    checked = [level for level in levels if level.check is not None]
    if not checked or in_trace():
        return
    digest = hashlib.blake2b(bytes(torch.get_rng_state().tolist()), digest_size=8)
    if torch.cuda.is_initialized():
        digest.update(bytes(torch.cuda.get_rng_state().tolist()))
    for level in checked:
        await_agreement(
            level.mesh, level.axis_name, f"torch's generators in the state {digest.hexdigest()}"
        )


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
        bound_names = {level.axis_name for level in mesh_levels()}
        unbound = [level for level in self.levels if level.axis_name not in bound_names]
        # Their depths do not matter: they have no tracers, and no kernels.
        return using(state.replace(levels=(*unbound, *state.levels))) if unbound else nullcontext()
