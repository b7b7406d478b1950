"""Lanes: some of a vmap's examples, run by themselves.

NOTE [lanes]
A branch or a loop's body is to run on those examples alone that take it. These examples (lanes) are
a batch of their own: a :class:`LaneLevel` stands in the place of the vmap's level while the body
runs, at the same depth, with fewer examples. What the body touches of the whole batch's tensors is
taken over by ``index_select`` of the physical value, whether it was passed in or closed over: door
1 has the arguments of the body's calls looked at before anything else (``taking_over``). The
results of the parts are put together by one ``cat`` and one ``index_select`` (``gathering``). A
lane that is left alone needs no batch: where nothing is recorded at the level, its tensors are
taken over as plain ones, and its steps cost what those of a loop without vmap cost.

What happens to physical values is recorded by the autograd of the levels outside as any operator
is. At the vmap's own level, and at levels inside of it, whose tracers have the vmap's tracers for
values, taking over is a linear map, and an ``autograd.Function`` of its own: NOTE [linear maps] in
``linear_maps``. Levels inside have captured the vmap's as one that is active outside of them; while
lanes are in its place they have captured these, so that their kernels draw for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.batch.split_level import StartAnew
from tsfunc.bridge.control.gathering import Into
from tsfunc.bridge.control.taking_over import TakingOver
from tsfunc.bridge.grad.linear_maps import is_recorded, linear
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.hot_calls import MadeTracer
from tsfunc.bridge.tracers.reruns import same_again
from tsfunc.bridge.tracers.tracer import StandIn, Tracer, TracerLevel, seen_here, settle
from tsfunc.dispatch.state import Level, capturing, tls, using
from tsfunc.ops.splitting import groups_of


class LaneLevel(BatchLevel, StandIn):
    """Some examples of a vmap, in the place of its level.

    Attributes:
        parent: the level that the examples are taken from.
        index: their numbers there, a tensor of outside of the level.
        alone: whether it is one lane, of which tensors are taken over as plain ones.
    """

    __slots__ = ("_composed", "_whole", "alone", "index", "parent")

    def __init__(self, parent: BatchLevel, index: torch.Tensor, alone: bool = False) -> None:
        self.stand_in_for(parent)
        self.parent = parent
        self.index = index
        self._whole = parent.whole
        self.batch_size = index.shape[0]
        self.inner = parent.inner.with_levels((*parent.outer.levels, self))
        self._kernel_states = {}
        self.alone = alone and _serves_plain(parent)
        self._composed = {id(parent): index}
        self.kind = MadeTracer
        self.born = 0
        self.lifts_factories = 0
        if parent.whole.courses is None and self.whole.randomness == "split":
            self.whole.courses = {}
        self.splitter = self if self.whole.splitter is not None else None

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """As long as the vmap: backward passes run after the body has."""
        return self.whole.alive

    @property
    def whole(self) -> BatchLevel:
        return self._whole

    @property
    def root(self) -> TracerLevel:
        return self.whole

    def index_in(self, level: BatchLevel) -> torch.Tensor:
        """The lanes' numbers among the examples of a level that they come from.

        Where they differ among the examples of a vmap outside, of which only some lanes may be
        left by now, they are these lanes' numbers.
        """
        known = self._composed.get(id(level))
        if known is not None:
            return known if type(known) is torch.Tensor else self._seen_outside(known)
        assert isinstance(self.parent, LaneLevel)
        parents, index = self.parent.index_in(level), self.index
        if type(parents) is torch.Tensor and type(index) is torch.Tensor:
            known = self._composed[id(level)] = parents.index_select(0, index)
            return known
        with self.restored():
            found: torch.Tensor = seen_here(parents).index_select(0, seen_here(index))
            return found

    def _seen_outside(self, value: torch.Tensor) -> torch.Tensor:
        """A value of outside of the level, as levels in the places of those outside have it."""
        with self.restored():
            found: torch.Tensor = seen_here(value)
            return found

    @property
    def numbers(self) -> torch.Tensor | None:
        """The lanes' numbers in the whole as a plain tensor, None for all in their places.

        Where the lanes differ among the examples of a vmap outside, each lane stands for the
        example in its place in the parent, or for none.
        """
        outer = self.parent.numbers if isinstance(self.parent, LaneLevel) else None
        if isinstance(self.index, Tracer):
            return outer
        return self.index if outer is None else outer.index_select(0, self.index)

    def examples(self, device: torch.device) -> torch.Tensor:
        return self.whole.examples(device)[self.index_in(self.whole).to(device)]

    def places(self) -> torch.Tensor:
        index = self.index_in(self.whole)
        return self.whole.places().to(index.device)[index]

    def agree(self, answers: torch.Tensor) -> None:
        """Goes on where all lanes answer alike; else the vmap begins anew without some of them.

        Of the other examples, which are in no need of an answer, none is put off.
        """
        groups = groups_of(answers)
        if len(groups) == 1:
            return
        splitter, size = self.whole.splitter, self.whole.batch_size
        assert splitter is not None
        index = torch.arange(size, device="cpu") if self.numbers is None else self.numbers.cpu()
        group = torch.zeros(size, dtype=torch.int64, device="cpu")
        for number, lanes in enumerate(sorted(groups, key=len, reverse=True)):
            group[index[lanes]] = number
        splitter.agree(group)
        raise StartAnew(self.whole)

    def ancestors(self) -> Iterator[BatchLevel]:
        """The levels that the lanes were taken from, directly or not."""
        level = self.parent
        while isinstance(level, LaneLevel):
            yield level
            level = level.parent
        yield level

    def comes_from(self, level: TracerLevel) -> bool:
        """Whether a level is what the lanes were taken from, directly or not."""
        return any(level is known for known in self.ancestors())

    def of_parent(self, what: str, tree: Any) -> Any:
        """What the parent's code has made, at these lanes alone."""
        parent = self.parent
        leaves, structure = pytrees.flatten(tree)
        if parent.autograd or parent.forward or any(map(self._wrapped_again, leaves)):
            return run_in(self, what, lambda taken: taken, (tree,))
        with parent.restored():
            taken = [
                self.physical(x.value, x.bdim, parent) if isinstance(x, BatchTracer) else x
                for x in leaves
            ]
        return pytrees.unflatten(structure, taken)

    def _wrapped_again(self, value: Any) -> bool:
        """Whether a tracer is of another level than the lanes' parent."""
        return isinstance(value, Tracer) and not (
            type(value) is MadeTracer and value.dispatch_level is self.parent
        )

    def physical(self, value: torch.Tensor, dim: int | None, level: BatchLevel) -> torch.Tensor:
        """A physical value of a level that the lanes come from, as the lanes have it."""
        if dim is not None:
            value = value.index_select(dim, self.index_in(level))
        if not self.alone:
            return wrap(value, dim, self)
        return value if dim is None else value.squeeze(dim)

    def replaces(self, value: Tracer) -> bool:
        """Whether a tracer is to be taken over to the lanes.

        It is where it, or a tracer inside of it, is of a level that the lanes come from. One that
        is the same for all examples is too, where its level differentiates by it: what the lanes
        pull back to it differs from example to example.
        """
        inner: Any = value
        recorded = False
        while isinstance(inner, Tracer) and inner.dispatch_level.depth > self.depth:
            recorded = recorded or is_recorded(inner)
            inner = getattr(inner, "value", None)
        if not isinstance(inner, Tracer) or inner.dispatch_level.depth < self.depth:
            return recorded
        return inner.dispatch_level is not self and self.comes_from(inner.dispatch_level)

    def into(self, value: Any) -> Any:
        """A value of a level that the lanes come from, at these lanes alone."""
        if isinstance(value, Tracer) and self.replaces(value):
            settle(value)
            return linear(Into(self), (value,))
        return value


def _serves_plain(level: BatchLevel) -> bool:
    """Whether code at a level could do without its tracers: nothing is recorded at it or inside."""
    inside = any(other.depth > level.depth for other in tls.state.levels)
    return not (inside or level.autograd or level.forward)


def lanes_of(level: BatchLevel, index: torch.Tensor, alone: bool = False) -> LaneLevel:
    """The examples of a level that have these numbers; ``alone`` as for the class."""
    size = index.shape[0]
    return same_again(
        lambda: LaneLevel(level, index, alone),
        lambda known: known.parent is level and known.batch_size == size,
    )


def guarded_lanes(level: BatchLevel, mask: torch.Tensor) -> LaneLevel:
    """A lane for every example: for those outside of the mask it has the first one that is in it.

    So a body sees no values that are not meant for it, where which those are can't be looked at.
    """
    numbers = torch.arange(level.batch_size, device=mask.device)
    return lanes_of(level, torch.where(mask, numbers, mask.long().argmax()))


@contextmanager
def in_lanes(lanes: LaneLevel, what: str) -> Iterator[None]:
    """The block runs on the lanes alone."""
    state = tls.state

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            [
                lanes if level.depth == lanes.depth and isinstance(level, BatchLevel) else level
                for level in levels
            ]
        )

    inside = [level for level in state.levels if level.depth > lanes.depth]
    with (
        capturing(inside, seen),
        using(state.with_levels(seen(state.levels), TakingOver(lanes, what))),
    ):
        yield


def run_in(lanes: LaneLevel, what: str, func: Callable[..., Any], args: Any) -> Any:
    """A function on the lanes' part of its arguments; what it returns is the lanes' too."""
    with in_lanes(lanes, what):
        taken = pytrees.tree_map(seen_here, args)
        return pytrees.tree_map(seen_here, func(*taken))
