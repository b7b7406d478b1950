"""The level of a ``vmap`` whose examples are spread over the ranks of mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsfunc.bridge.mesh.levels import MeshLevel, mesh_levels
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.draw_keys import CallKeys
from tsfunc.errors import UnboundAxisError


class SpreadLevel(BatchLevel):
    """A level with some examples of a batch; other ranks have the other examples.

    Args:
        axes: the mesh axes that the batch is spread over, the slowest varying first. All must be
            bound when the level is made.

    Raises:
        UnboundAxisError: an axis is not bound.
    """

    __slots__ = ()

    spread_over: tuple[MeshLevel, ...]

    def __init__(
        self, batch_size: int, randomness: str, name: str, strict: bool, axes: Sequence[str]
    ) -> None:
        bound = {level.axis_name: level for level in mesh_levels()}
        for axis in axes:
            if axis not in bound:
                raise UnboundAxisError(
                    f"{name}: expected a mesh axis that is bound here ({list(bound)}), got "
                    f"{axis!r}. Call it inside of shard_map or mesh_axes.",
                    axis,
                )
        over = tuple(bound[axis] for axis in axes)
        # The level has a mode of its own: that of the axes does not refuse its key.
        keys = CallKeys(without=over) if randomness == "split" else None
        super().__init__(batch_size, randomness, name, strict, keys=keys)
        self.spread_over = over

    def example_indices(self, device: torch.device) -> torch.Tensor:
        """Return the index of each example in the batch of all ranks."""
        index: Any = 0
        for level in self.spread_over:
            index = index * level.batch_size + level.index(device)
        indices = torch.arange(self.batch_size, device=device)
        return index * self.batch_size + indices
