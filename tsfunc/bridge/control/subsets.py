"""Active subsets: some examples of a vmap, run as a batch of their own.

NOTE [active subsets]
A branch or a loop's body runs only on the examples that take it. These examples are a batch of
their own: while the body runs, a :class:`SubsetLevel` replaces the vmap's level, at the same depth
and with fewer examples. Each tensor of the whole batch that the body touches, passed in or closed
over, is replaced by its ``index_select``: the function handler remaps the arguments of the body's
calls before it does anything else (``remap_args``). One ``cat`` and one ``index_select`` merge the
results of the subsets (``subset_maps``). A subset of a single example needs no batch: if nothing is
recorded at the level, its tensors are plain, and its steps cost as much as without vmap.

The autograd of outer levels records operations on physical values like any operator. At the vmap's
own level, and at inner levels, whose tracers wrap the vmap's tracers, the remapping is a linear map
with an ``autograd.Function`` of its own: NOTE [linear maps] in ``linear_maps``. Inner levels have
captured the vmap's level as an active outer one; they capture the subset's level while it replaces
the vmap's, so that their kernels draw random numbers for the subset alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.batch.split_level import StartAnew
from tsfunc.bridge.control.remap_args import ArgRemapper
from tsfunc.bridge.control.subset_maps import Select
from tsfunc.bridge.grad.linear_maps import is_recorded, linear
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.draw_keys import draw_counts, keeping_draw_counts, set_draw_counts
from tsfunc.bridge.tracers.fast_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.replay import replayed
from tsfunc.bridge.tracers.tracer import (
    LevelProxy,
    Tracer,
    TracerLevel,
    as_seen_by_current_level,
    sync,
)
from tsfunc.dispatch.state import Level, capturing, tls, using
from tsfunc.ops.splitting import groups_of


class SubsetLevel(BatchLevel, LevelProxy):
    """A subset of the examples of a vmap, which replaces the vmap's level.

    Attributes:
        parent: the level that the examples are selected from.
        index: the examples' indices in the parent, an int tensor of the outer levels.
        single: True if it is one example whose tensors are plain.
    """

    __slots__ = ("_composed", "_whole", "index", "parent", "single")

    def __init__(self, parent: BatchLevel, index: torch.Tensor, single: bool = False) -> None:
        self.copy_from(parent)
        self.parent = parent
        self.index = index
        self._whole = parent.whole
        self.batch_size = index.shape[0]
        self.inner = parent.inner.with_levels((*parent.outer.levels, self))
        self._kernel_states = {}
        self.single = single and _serves_plain(parent)
        self._composed = {id(parent): index}
        self.kind = SlottedBatchTracer
        self.created_at = 0
        self.lifts_factories = 0
        self.splitter = self if self.whole.splitter is not None else None

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """True as long as the vmap is active: backward passes run after the body."""
        return self.whole.alive

    @property
    def whole(self) -> BatchLevel:
        return self._whole

    @property
    def root(self) -> TracerLevel:
        return self.whole

    def index_in(self, level: BatchLevel) -> torch.Tensor:
        """Return the indices of the examples in an ancestor.

        If the indices differ among the examples of an outer vmap, and a subset currently replaces
        that vmap, the result has the indices for that subset.
        """
        known = self._composed.get(id(level))
        if known is not None:
            return known if type(known) is torch.Tensor else self._seen_outside(known)
        assert isinstance(self.parent, SubsetLevel)
        parents, index = self.parent.index_in(level), self.index
        if type(parents) is torch.Tensor and type(index) is torch.Tensor:
            known = self._composed[id(level)] = parents.index_select(0, index)
            return known
        with self.restored():
            found: torch.Tensor = as_seen_by_current_level(parents).index_select(
                0, as_seen_by_current_level(index)
            )
            return found

    def _seen_outside(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value of the outer levels as the currently active outer levels see it."""
        with self.restored():
            found: torch.Tensor = as_seen_by_current_level(value)
            return found

    @property
    def numbers(self) -> torch.Tensor | None:
        """The indices of the examples in the whole batch as a plain tensor; None for all in order.

        If the indices differ among the examples of an outer vmap, each example of the subset
        counts as the example at its position in the parent.
        """
        outer = self.parent.numbers if isinstance(self.parent, SubsetLevel) else None
        if isinstance(self.index, Tracer):
            return outer
        return self.index if outer is None else outer.index_select(0, self.index)

    def examples(self, device: torch.device) -> torch.Tensor:
        return self.whole.examples(device)[self.index_in(self.whole).to(device)]

    def agree(self, answers: torch.Tensor) -> None:
        """Return None if all examples of the subset agree; otherwise restart the vmap.

        Examples outside of the subset, which need no answer, are never put off.

        Raises:
            StartAnew: the examples of the subset have different answers.
        """
        groups = groups_of(answers)
        if len(groups) == 1:
            return
        splitter, size = self.whole.splitter, self.whole.batch_size
        assert splitter is not None
        index = torch.arange(size, device="cpu") if self.numbers is None else self.numbers.cpu()
        group = torch.zeros(size, dtype=torch.int64, device="cpu")
        for number, subset in enumerate(sorted(groups, key=len, reverse=True)):
            group[index[subset]] = number
        splitter.agree(group)
        raise StartAnew(self.whole)

    def ancestors(self) -> Iterator[BatchLevel]:
        """Yield the levels that the subset was selected from, the closest first."""
        level = self.parent
        while isinstance(level, SubsetLevel):
            yield level
            level = level.parent
        yield level

    def comes_from(self, level: TracerLevel) -> bool:
        """True if the subset was selected from a level, directly or not."""
        return any(level is known for known in self.ancestors())

    def of_parent(self, what: str, tree: Any) -> Any:
        """Return values of the parent's code for the examples of the subset."""
        parent = self.parent
        leaves, structure = pytrees.flatten(tree)
        if parent.autograd or parent.forward or any(map(self._wrapped_again, leaves)):
            return run_in_subset(self, what, lambda taken: taken, (tree,))
        with parent.restored():
            taken = [
                self.physical(x.value, x.bdim, parent) if isinstance(x, BatchTracer) else x
                for x in leaves
            ]
        return pytrees.unflatten(structure, taken)

    def _wrapped_again(self, value: Any) -> bool:
        """True if a tracer belongs to a level other than the subset's parent."""
        return isinstance(value, Tracer) and not (
            type(value) is SlottedBatchTracer and value.dispatch_level is self.parent
        )

    def physical(self, value: torch.Tensor, dim: int | None, level: BatchLevel) -> torch.Tensor:
        """Return the subset's part of a physical value of an ancestor."""
        if dim is not None:
            value = value.index_select(dim, self.index_in(level))
        if not self.single:
            return wrap(value, dim, self)
        return value if dim is None else value.squeeze(dim)

    def replaces(self, value: Tracer) -> bool:
        """True if the subset remaps a tracer.

        It does if the tracer, or one that it wraps, belongs to an ancestor. A tracer that is
        unbatched there is remapped too if an inner level differentiates by it: its gradient
        differs from example to example.
        """
        inner: Any = value
        recorded = False
        while isinstance(inner, Tracer) and inner.dispatch_level.depth > self.depth:
            recorded = recorded or is_recorded(inner)
            inner = getattr(inner, "value", None)
        if not isinstance(inner, Tracer) or inner.dispatch_level.depth < self.depth:
            return recorded
        return inner.dispatch_level is not self and self.comes_from(inner.dispatch_level)

    def remap(self, value: Any) -> Any:
        """Return the subset's part of a value of an ancestor; other values are unchanged."""
        if isinstance(value, Tracer) and self.replaces(value):
            sync(value)
            return linear(Select(self), (value,))
        return value


def _serves_plain(level: BatchLevel) -> bool:
    """True if code at a level can use plain tensors: neither it nor an inner level records."""
    inside = any(other.depth > level.depth for other in tls.state.levels)
    return not (inside or level.autograd or level.forward)


def subset_of(level: BatchLevel, index: torch.Tensor, single: bool = False) -> SubsetLevel:
    """Return the level of the examples with these indices; ``single`` as for the class."""
    size = index.shape[0]
    subset = replayed(
        lambda: SubsetLevel(level, index, single),
        lambda known: known.parent is level and known.batch_size == size,
    )
    subset.drawn = level.drawn
    return subset


def guarded_subset(level: BatchLevel, mask: torch.Tensor) -> SubsetLevel:
    """Return a subset with as many examples as the level, for a mask that can't be read.

    An example outside of the mask is replaced by the first one inside, so that a body never sees
    values of examples that do not take it.
    """
    numbers = torch.arange(level.batch_size, device=mask.device)
    return subset_of(level, torch.where(mask, numbers, mask.long().argmax()))


@contextmanager
def in_subset(subset: SubsetLevel, what: str) -> Iterator[None]:
    """Context manager: the block runs on the subset alone, and goes on from its examples' draws."""
    state = tls.state

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            [
                subset if level.depth == subset.depth and isinstance(level, BatchLevel) else level
                for level in levels
            ]
        )

    inside = [level for level in state.levels if level.depth > subset.depth]
    with (
        capturing(inside, seen),
        using(state.with_levels(seen(state.levels), ArgRemapper(subset, what))),
        keeping_draw_counts(subset.depth),
    ):
        set_draw_counts(draw_counts(subset.depth))
        yield


def run_in_subset(subset: SubsetLevel, what: str, func: Callable[..., Any], args: Any) -> Any:
    """Call a function on the subset's part of its arguments; its results belong to the subset."""
    with in_subset(subset, what):
        taken = pytrees.tree_map(as_seen_by_current_level, args)
        return pytrees.tree_map(as_seen_by_current_level, func(*taken))
