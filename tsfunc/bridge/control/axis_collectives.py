"""Collectives over named axes: the examples of a vmap, or the ranks of a mesh.

Over a vmap, a collective is a linear map of a level's tensors (NOTE [linear maps] in
``linear_maps``). The sum over the examples, for instance, sums over the batch dim, and its result
is the same for each example. The transpose of a collective is a collective, too. Over a mesh, a
collective is one operator: NOTE [exchanges] in ``bridge/mesh/mesh_operators``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.bridge.control.attempts import CannotUnbatch, NeedsWholeBatch
from tsfunc.bridge.control.bodies import HiddenVmap
from tsfunc.bridge.control.subsets import SubsetLevel
from tsfunc.bridge.grad.linear_maps import (
    LinearMap,
    at_level,
    batched_value,
    linear,
    rebuilt,
    value_batch_first,
)
from tsfunc.bridge.mesh.levels import MeshLevel, mesh_levels
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.dispatch.state import tls
from tsfunc.errors import UnboundAxisError

Axis = BatchLevel | MeshLevel


def level_named(name: Any, label: str, *, alone: bool = False) -> Axis:
    """Return the innermost active level that binds an axis.

    Args:
        alone: True if the operation does not need the values of other examples.

    Raises:
        UnboundAxisError: no active level binds it; the message lists those that are bound.
        NeedsWholeBatch: a branch or a loop's body runs on an active subset of the examples.
    """
    # Errors for code that runs on a subset of examples that may differ along an outer axis (between
    # the ranks of a mesh, or between the examples of a vmap).
    on_ranks: NeedsWholeBatch | None = None
    by_example: NeedsWholeBatch | None = None
    for level in reversed(tls.state.levels):
        if isinstance(level, MeshLevel):
            if level.axis_name == name:
                if on_ranks is not None and not alone:
                    raise on_ranks
                return level
        elif isinstance(level, BatchLevel):
            subset = level.original
            if level.axis_name == name and name is not None:
                if isinstance(subset, SubsetLevel) and not alone:
                    raise NeedsWholeBatch(subset.root)
                if by_example is not None and not alone:
                    raise by_example
                return level
            if isinstance(subset, SubsetLevel):
                on_ranks = NeedsWholeBatch(subset.root)
                if isinstance(subset.index, Tracer):
                    by_example = on_ranks
        elif isinstance(level, HiddenVmap):
            on_ranks = CannotUnbatch(level.parent.original.root)
            if level.parent.axis_name == name and name is not None:
                raise on_ranks
    raise UnboundAxisError(_unbound(name, label), name)


def _unbound(name: Any, label: str) -> str:
    """Return the message for an axis that no active level binds."""
    vmapped = [
        repr(level.axis_name)
        for level in tls.state.levels
        if isinstance(level, BatchLevel) and level.axis_name is not None
    ]
    of_mesh = [repr(level.axis_name) for level in mesh_levels()]
    names = ", ".join(vmapped) or "none"
    if of_mesh:
        names += f" of vmaps, and of a mesh: {', '.join(of_mesh)}"
    return (
        f"{label}: unbound axis name: {name!r}. The axes that are bound here: {names}. Bind one "
        f"with vmap(f, axis_name={name!r}), or by the mesh of shard_map or mesh_axes."
    )


def is_bound(name: Any) -> bool:
    """True if an active level binds the axis."""
    for level in tls.state.levels:
        bound = level.parent if isinstance(level, HiddenVmap) else level
        if isinstance(bound, BatchLevel | MeshLevel) and bound.axis_name == name:
            return True
    return False


def named_axes(within: TracerLevel) -> list[BatchLevel]:
    """Return the active vmaps inside of a level that have named axes."""
    return [
        level
        for level in tls.state.levels
        if isinstance(level, BatchLevel)
        and level.axis_name is not None
        and level.depth > within.depth
    ]


class Collective(LinearMap):
    """A collective along the axis of one vmap.

    Attributes:
        axes: the dims that it adds, removes or fills, as dims of one example.
    """

    def __init__(self, level: BatchLevel, *axes: int) -> None:
        self.level, self.axes = level, axes

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level = value.dispatch_level
        with level.restored():
            if level.depth <= self.level.depth:
                return self.physical(*batched_value(value, self.level))
            # An inner level has its own batch dim, which is moved to the front and stays there.
            batched = getattr(value, "bdim", None) is not None
            inner = value_batch_first(value, level) if batched else value.value
            out = self.with_leading_dims(batched).of(inner)
            return rebuilt(value, out, 0 if batched else None)

    def with_leading_dims(self, by: int) -> Collective:
        """Return the same collective for values with ``by`` more dims in front."""
        return type(self)(self.level, *(axis + by for axis in self.axes))

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        """Return the collective of a physical value whose batch dim is ``dim``."""
        raise NotImplementedError

    def of(self, value: torch.Tensor) -> Any:
        return linear(self, (at_level(value, self.level),))

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (self.transposed().of(cotangent),)

    def transposed(self) -> Collective:
        raise NotImplementedError


class Sum(Collective):
    """The sum of all examples, which is the same for each example."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        return wrap(value.sum(dim), None, self.level)

    def transposed(self) -> Collective:
        return self


class Gather(Collective):
    """All examples along a new dim, which are the same for each example."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        return wrap(value.movedim(dim, self.axes[0]), None, self.level)

    def transposed(self) -> Collective:
        return SumScatter(self.level, *self.axes)


class SumScatter(Collective):
    """The sum of all examples, with one slice of a dim for each example."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        return wrap(value.sum(dim), self.axes[0], self.level)

    def transposed(self) -> Collective:
        return Gather(self.level, *self.axes)


class AllToAll(Collective):
    """The exchange of slices: split a dim among the examples, and concatenate along another."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        split, concat = self.axes
        sent = value.movedim(dim, 0).movedim(split + 1, 0)
        return wrap(sent.movedim(1, concat + 1), 0, self.level)

    def transposed(self) -> Collective:
        return AllToAll(self.level, *reversed(self.axes))


class Permute(Collective):
    """The transfer of values between pairs of examples; zeros for examples that receive none."""

    def __init__(self, level: BatchLevel, pairs: Sequence[tuple[int, int]]) -> None:
        super().__init__(level)
        self.pairs = tuple(pairs)

    def with_leading_dims(self, by: int) -> Collective:
        return self

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        source = [0] * self.level.batch_size
        receives = [False] * self.level.batch_size
        for sender, receiver in self.pairs:
            source[receiver], receives[receiver] = sender, True
        moved = value.index_select(dim, torch.tensor(source, device=value.device))
        if not all(receives):
            shape = [1] * value.dim()
            shape[dim] = self.level.batch_size
            mask = torch.tensor(receives, device=value.device).view(shape)
            moved = torch.where(mask, moved, torch.zeros_like(moved))
        return wrap(moved, dim, self.level)

    def transposed(self) -> Collective:
        return Permute(self.level, [(receiver, sender) for sender, receiver in self.pairs])


def _collect(
    level: Axis, value: torch.Tensor, kind: str, cls: Callable[..., Collective], *ints: int
) -> torch.Tensor:
    """Return a collective: by an exchange of a mesh's ranks, or over the examples of a vmap."""
    if isinstance(level, MeshLevel):
        return level.exchange(kind, ints, value)
    return cls(level, *ints).of(value)


def sum_over_axis(level: Axis, value: torch.Tensor) -> torch.Tensor:
    """Return the sum over an axis, which is the same for each of its indices."""
    return _collect(level, value, "sum", Sum)


def all_gather(level: Axis, value: torch.Tensor, dim: int) -> torch.Tensor:
    """Return all values of an axis along a new dim."""
    return _collect(level, value, "gather", Gather, dim)


def reduce_scatter(level: Axis, value: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum over an axis, with one slice of ``dim`` for each index."""
    return _collect(level, value, "scatter", SumScatter, dim)


def all_to_all(level: Axis, value: torch.Tensor, split: int, concat: int) -> torch.Tensor:
    """Send each index its slice of ``split``, and return the received slices along ``concat``."""
    return _collect(level, value, "all_to_all", AllToAll, split, concat)


def permute(level: Axis, value: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send values along an axis; return zeros for an index that receives none."""
    if isinstance(level, MeshLevel):
        ints = [source for source, _ in pairs] + [destination for _, destination in pairs]
        return level.exchange("permute", ints, value)
    return Permute(level, pairs).of(value)


def axis_index(level: Axis, device: torch.device | None) -> torch.Tensor:
    """Return each example's index along an axis."""
    if isinstance(level, MeshLevel):
        return level.index(device)
    subset = level.original
    if not isinstance(subset, SubsetLevel):
        return wrap(torch.arange(level.batch_size, device=device), 0, level)
    numbers = subset.index_in(subset.root)
    return wrap(numbers if device is None else numbers.to(device), 0, level)


def axis_size(level: Axis) -> int:
    """Return the number of examples of an axis, even if a subset of them is running."""
    if isinstance(level, MeshLevel):
        return level.batch_size
    subset = level.original
    whole = subset.root if isinstance(subset, SubsetLevel) else level
    return whole.batch_size
