"""Collectives over the examples of a vmap: what they do to physical values.

A collective is a linear map of a level's tensors, as NOTE [linear maps] in ``linear_maps`` has it:
the sum over the examples sums the batch dim away, and what it gives is the same for each. Its
transpose is a collective again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsfunc.bridge.control.attempts import NeedsAll, NotApart
from tsfunc.bridge.control.bodies import SetApart
from tsfunc.bridge.control.lanes import LaneLevel
from tsfunc.bridge.grad.linear_maps import LinearMap, at_level, batched_value, linear, rebuilt
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch.state import tls
from tsfunc.errors import UnboundAxisError


def level_named(name: Any, what: str, *, alone: bool = False) -> BatchLevel:
    """The innermost active vmap of a name.

    Args:
        name: the axis.
        what: how errors call the collective.
        alone: whether an example can do without the others' values.

    Raises:
        UnboundAxisError: there is none; the message lists those that there are.
        NeedsAll: the code that runs is a branch or a loop's body, on the examples that take it.
    """
    for level in reversed(tls.state.levels):
        if isinstance(level, BatchLevel) and level.axis_name == name and name is not None:
            if isinstance(level.origin, LaneLevel) and not alone:
                raise NeedsAll(level.origin.whole)
            return level
        if isinstance(level, SetApart) and level.parent.axis_name == name and name is not None:
            raise NotApart(level.parent.origin.whole)
    bound = [level.axis_name for level in tls.state.levels if isinstance(level, BatchLevel)]
    names = ", ".join(repr(known) for known in bound if known is not None) or "none"
    raise UnboundAxisError(
        f"{what}: unbound axis name: {name!r}. The axes that are bound here: {names}. Bind one "
        f"with vmap(f, axis_name={name!r}).",
        name,
    )


def is_bound(name: Any) -> bool:
    """Whether an active vmap has that name."""
    for level in tls.state.levels:
        vmapped = level.parent if isinstance(level, SetApart) else level
        if isinstance(vmapped, BatchLevel) and vmapped.axis_name == name:
            return True
    return False


def named_axes(within: TracerLevel) -> list[BatchLevel]:
    """The active vmaps inside of a level whose axes have names."""
    return [
        level
        for level in tls.state.levels
        if isinstance(level, BatchLevel)
        and level.axis_name is not None
        and level.depth > within.depth
    ]


class Collective(LinearMap):
    """A collective at one level.

    Attributes:
        level: the vmap.
        axes: the dims that it makes, takes or fills, as the examples have them.
    """

    def __init__(self, level: BatchLevel, *axes: int) -> None:
        self.level, self.axes = level, axes

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level = value.dispatch_level
        with level.restored():
            if level.depth <= self.level.depth:
                return self.physical(*batched_value(value, self.level))
            # A level inside has a batch dim of its own, which goes first and stays there.
            inner, dim = value.value, getattr(value, "bdim", None)
            if dim is not None:
                inner = inner.movedim(dim, 0)
            out = self.shifted(dim is not None).of(inner)
            return rebuilt(value, out, None if dim is None else 0)

    def shifted(self, by: int) -> Collective:
        """The same for values that have as many dims more in front."""
        return type(self)(self.level, *(axis + by for axis in self.axes))

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        """The collective of a physical value whose batch dim is ``dim``."""
        raise NotImplementedError

    def of(self, value: torch.Tensor) -> Any:
        """The collective of a tensor."""
        return linear(self, (at_level(value, self.level),))

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (self.transposed().of(cotangent),)

    def transposed(self) -> Collective:
        raise NotImplementedError


class Sum(Collective):
    """The sum of all examples, the same for each."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        return wrap(value.sum(dim), None, self.level)

    def transposed(self) -> Collective:
        return self


class Gather(Collective):
    """All examples along a new dim, the same for each."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        return wrap(value.movedim(dim, self.axes[0]), None, self.level)

    def transposed(self) -> Collective:
        return SumScatter(self.level, *self.axes)


class SumScatter(Collective):
    """The sum of all examples, of which each is given its slice of a dim."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        return wrap(value.sum(dim), self.axes[0], self.level)

    def transposed(self) -> Collective:
        return Gather(self.level, *self.axes)


class AllToAll(Collective):
    """Slices of a dim sent to the examples, and those that come in put along another."""

    def physical(self, value: torch.Tensor, dim: int) -> Any:
        split, concat = self.axes
        sent = value.movedim(dim, 0).movedim(split + 1, 0)
        return wrap(sent.movedim(1, concat + 1), 0, self.level)

    def transposed(self) -> Collective:
        return AllToAll(self.level, *reversed(self.axes))


class Permute(Collective):
    """Each example's value sent to another; zeros where none comes."""

    def __init__(self, level: BatchLevel, pairs: Sequence[tuple[int, int]]) -> None:
        super().__init__(level)
        self.pairs = tuple(pairs)

    def shifted(self, by: int) -> Collective:
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


def index(level: BatchLevel, device: torch.device | None) -> torch.Tensor:
    """Each example's number."""
    lanes = level.origin
    if not isinstance(lanes, LaneLevel):
        return wrap(torch.arange(level.batch_size, device=device), 0, level)
    numbers = lanes.index_in(lanes.whole)
    return wrap(numbers if device is None else numbers.to(device), 0, level)


def size(level: BatchLevel) -> int:
    """How many examples the axis has, of which some may be running by themselves."""
    lanes = level.origin
    return lanes.whole.batch_size if isinstance(lanes, LaneLevel) else level.batch_size
