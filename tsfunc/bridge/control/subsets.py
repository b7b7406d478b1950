"""Active subsets: some examples of a vmap, run as a batch of their own.

NOTE [active subsets]
A branch or a loop's body runs only on the examples that take it. These examples are a batch of
their own: while the body runs, a :class:`SubsetLevel` replaces the vmap's level, at the same depth
and with fewer examples. Each tensor of the whole batch that the body touches, passed in or closed
over, is replaced by its ``index_select``: the function handler remaps the arguments of the body's
calls before it does anything else (``subset_arguments``). One ``cat`` and one ``index_select``
merge the results of the subsets (:class:`Merge`). A subset of a single example needs no batch: if
nothing is recorded at the level, its tensors are plain, and its steps cost as much as without vmap.

The autograd of outer levels records operations on physical values like any operator. At the vmap's
own level, and at inner levels, whose tracers wrap the vmap's tracers, the remapping is a linear map
with an ``autograd.Function`` of its own: NOTE [linear maps] in ``linear_maps``. Inner levels have
captured the vmap's level as an active outer one; they capture the subset's level while it replaces
the vmap's, so that their kernels draw random numbers for the subset alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from tsfunc import pytrees
from tsfunc.bridge.batch.split_level import RestartRun
from tsfunc.bridge.control.subset_arguments import (
    ArgRemapper,
    is_made_inside,
    shared_by_examples,
    write_count,
)
from tsfunc.bridge.grad.linear_maps import (
    LinearMap,
    at_level,
    batched_value,
    is_recorded,
    linear,
    rebuilt,
    value_batch_first,
)
from tsfunc.bridge.trace.trace_level import TraceLevel
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.draw_keys import draw_counts, preserve_draw_counts, set_draw_counts
from tsfunc.bridge.tracers.level_proxies import LevelProxy, as_seen_by_current_level
from tsfunc.bridge.tracers.replay import replay_object
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, sync
from tsfunc.dispatch.state import Level, replacing_captured_levels, tls, using
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import InplaceRefused
from tsfunc.ops.splitting import groups_of

# --- the level of a subset


class SubsetLevel(BatchLevel, LevelProxy):
    """A subset of the examples of a vmap, which replaces the vmap's level.

    Attributes:
        parent: the level that the examples are selected from.
        index: the examples' indices in the parent, an int tensor of the outer levels.
        mask: for examples that another one may stand for (:func:`run_guarded`), True for those that
            stand for themselves, a tensor of the outer levels; otherwise None.
        single: True if it is one example whose tensors are plain.
    """

    __slots__ = ("_composed", "_root", "index", "mask", "parent", "single")

    def __init__(self, parent: BatchLevel, index: torch.Tensor, single: bool = False) -> None:
        self.copy_from(parent)
        self.parent = parent
        self.index = index
        self.mask: torch.Tensor | None = None
        self._root = parent.root
        self.batch_size = index.shape[0]
        self.inner = parent.inner.replace(levels=(*parent.outer.levels, self))
        self._kernel_states = {}
        self.single = single and _serves_plain(parent)
        self._composed = {id(parent): index}
        self.kind = SlottedBatchTracer
        self.lifts_factories = 0
        self.splitter = self if self.root.splitter is not None else None

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """True as long as the vmap is active: backward passes run after the body."""
        return self.root.alive

    @property
    def root(self) -> BatchLevel:
        return self._root

    def index_in(self, level: BatchLevel) -> torch.Tensor:
        """Return the indices of the examples in an ancestor.

        If the indices differ among the examples of an outer vmap, and a subset currently replaces
        that vmap, the result has the indices for that subset.
        """
        composed = self._composed.get(id(level))
        if composed is not None:
            return composed if type(composed) is torch.Tensor else self._seen_in_closure(composed)
        assert isinstance(self.parent, SubsetLevel)
        parents, index = self.parent.index_in(level), self.index
        if type(parents) is torch.Tensor and type(index) is torch.Tensor:
            composed = self._composed[id(level)] = parents.index_select(0, index)
            return composed
        with self.restored():
            return as_seen_by_current_level(parents).index_select(
                0, as_seen_by_current_level(index)
            )

    def _seen_in_closure(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value of the outer levels as the currently active outer levels see it."""
        with self.restored():
            return as_seen_by_current_level(value)

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

    def example_indices(self, device: torch.device) -> torch.Tensor:
        return self.root.example_indices(device)[self.index_in(self.root).to(device)]

    def agree(self, answers: torch.Tensor) -> None:
        """Return None if all examples of the subset agree; otherwise restart the vmap.

        Examples outside of the subset, which need no answer, are never put off.

        Raises:
            RestartRun: the examples of the subset have different answers.
        """
        groups = groups_of(answers)
        if len(groups) == 1:
            return
        splitter, size = self.root.splitter, self.root.batch_size
        assert splitter is not None
        index = torch.arange(size, device="cpu") if self.numbers is None else self.numbers.cpu()
        group = torch.zeros(size, dtype=torch.int64, device="cpu")
        for number, subset in enumerate(sorted(groups, key=len, reverse=True)):
            group[index[subset]] = number
        splitter.agree(group)
        raise RestartRun(self.root)

    def ancestors(self) -> Iterator[BatchLevel]:
        """Yield the levels that the subset was selected from, the closest first."""
        level = self.parent
        while isinstance(level, SubsetLevel):
            yield level
            level = level.parent
        yield level

    def comes_from(self, level: TracerLevel) -> bool:
        """True if the subset was selected from a level, directly or not."""
        return any(level is ancestor for ancestor in self.ancestors())

    def of_parent(self, label: str, tree: Any) -> Any:
        """Return values of the parent's code for the examples of the subset."""
        parent = self.parent
        leaves, structure = pytrees.flatten(tree)
        if parent.autograd or parent.forward or any(map(self._wrapped_again, leaves)):
            return run_in_subset(self, label, lambda taken: taken, (tree,))
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

    def physical(self, value: torch.Tensor, bdim: int | None, level: BatchLevel) -> torch.Tensor:
        """Return the subset's part of a physical value of an ancestor."""
        if bdim is not None:
            value = value.index_select(bdim, self.index_in(level))
        if not self.single:
            return wrap(value, bdim, self)
        return value if bdim is None else value.squeeze(bdim)

    def replaces(self, value: Tracer) -> bool:
        """True if the subset remaps a tracer.

        A subset remaps a tracer if that, or one that it wraps, belongs to an ancestor. A tracer
        that is unbatched there is remapped too if an inner level differentiates by it: its gradient
        differs from example to example. A tracer of an inner subset that the body has selected is
        remapped already, or made in the body.
        """
        inner: Any = value
        recorded = False
        while isinstance(inner, Tracer) and inner.dispatch_level.depth > self.depth:
            recorded = recorded or (
                is_recorded(inner) and not _is_selected_inside(inner.dispatch_level, self)
            )
            inner = getattr(inner, "value", None)
        if not isinstance(inner, Tracer) or inner.dispatch_level.depth < self.depth:
            return recorded
        return inner.dispatch_level is not self and self.comes_from(inner.dispatch_level)

    def merged(self, value: Any, part: Any) -> Any:
        """Return a value of the code around the subset's with a part for its examples."""
        level = next(active for active in tls.state.levels if active.depth == self.depth)
        assert isinstance(level, BatchLevel)
        others = torch.ones(level.batch_size, dtype=torch.bool, device=self.index.device)
        others[self.index_in(level)] = False
        rest = subset_of(level, others.nonzero().squeeze(1))
        return Merge([self, rest], level).of([part, value])

    def remap(self, value: Any) -> Any:
        """Return the subset's part of a value of an ancestor; other values are unchanged."""
        if isinstance(value, Tracer) and self.replaces(value):
            sync(value)
            return linear(Select(self), (value,))
        return value


def _is_selected_inside(level: Level, subset: SubsetLevel) -> bool:
    """True if a level is a subset that the running body of another subset has selected."""
    remapper = cast("ArgRemapper | None", tls.state.remap_args)
    while remapper is not None and remapper.subset is not subset:
        if remapper.subset is level:
            return True
        remapper = remapper.outside
    return False


def _serves_plain(level: BatchLevel) -> bool:
    """True if code at a level can use plain tensors: neither it nor an inner level records."""
    inside = any(other.depth > level.depth for other in tls.state.levels)
    return not (inside or level.autograd or level.forward)


def subset_of(level: BatchLevel, index: torch.Tensor, single: bool = False) -> SubsetLevel:
    """Return the level of the examples with these indices; ``single`` as for the class."""
    size = index.shape[0]
    subset = replay_object(
        lambda: SubsetLevel(level, index, single),
        lambda known: known.parent is level and known.batch_size == size,
    )
    subset.draw_count = level.draw_count
    return subset


@contextmanager
def in_subset(
    subset: SubsetLevel,
    label: str,
    roots: Sequence[Any],
    merged: Callable[[Any, Any], Any] | None = None,
) -> Iterator[ArgRemapper]:
    """Context manager: the block runs on the subset alone, and goes on from its examples' draws.

    Args:
        label: the name of the call, for messages.
        roots: the body that the block runs, and its arguments.
        merged: returns a tensor of the parent from one of the parent and a part that replaces
            that of the subset.

    Raises:
        RuntimeError: the block writes into a tensor that examples outside of the subset share.
    """
    state = tls.state
    subset.outside_roots = roots

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            [
                subset if level.depth == subset.depth and isinstance(level, BatchLevel) else level
                for level in levels
            ]
        )

    outside = cast(ArgRemapper | None, state.remap_args)
    remapper, shared = ArgRemapper(subset, label, outside), shared_by_examples(roots)
    inside = [level for level in state.levels if level.depth > subset.depth]
    with (
        replacing_captured_levels(inside, seen),
        using(state.replace(levels=seen(state.levels), remap_args=remapper)),
        preserve_draw_counts(subset.depth),
    ):
        set_draw_counts(draw_counts(subset.depth))
        yield remapper
    for value, part in remapper.written():
        try:
            value.copy_((merged or subset.merged)(value, part))
        except InplaceRefused:  # the examples of an outer vmap share it
            raise RuntimeError(remapper.refused(value)) from None
    for tensor, count in shared:
        if write_count(tensor) != count and is_made_inside(tensor, subset.root):
            raise RuntimeError(remapper.refused(tensor))


def run_in_subset(
    subset: SubsetLevel,
    label: str,
    func: Callable[..., Any],
    args: Any,
    merged: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Call a function on the subset's part of its arguments; its results belong to the subset."""
    with in_subset(subset, label, (func, args), merged) as remapper:
        taken = pytrees.tree_map(remapper.remapped, args)
        return pytrees.tree_map(_seen_by(remapper), func(*taken))


def _seen_by(remapper: ArgRemapper) -> Callable[[Any], Any]:
    """Return the function that returns a result as the body sees it."""

    def seen(leaf: Any) -> Any:
        return (
            remapper.remapped(leaf) if isinstance(leaf, Tracer) else as_seen_by_current_level(leaf)
        )

    return seen


def run_guarded(
    level: BatchLevel, mask: torch.Tensor, label: str, func: Callable[..., Any], args: Any
) -> Any:
    """Call a function on all examples of a level, for a mask that can't be read.

    An example outside of the mask is replaced by the first one inside, so that a body never sees
    values of examples that do not take it.
    """
    numbers = torch.arange(level.batch_size, device=mask.device)
    subset = subset_of(level, torch.where(mask, numbers, mask.long().argmax()))
    subset.mask = mask

    def merged(value: Any, part: Any) -> Any:
        return torch.where(wrap(mask, 0, level), relabel(part, subset, level), value)

    result = run_in_subset(subset, label, func, args, merged)
    return pytrees.tree_map(lambda leaf: relabel(leaf, subset, level), result)


# --- linear maps between a batch and its subsets


def _refuse_trace(level: TracerLevel) -> None:
    """Refuse a value of a trace: the sizes of subsets depend on the data of an earlier call."""
    if isinstance(level, TraceLevel):
        raise DataDependentError(
            "a program can't differentiate through control flow that ran before the trace and took "
            "different paths for the examples of vmap. Call vjp or linearize inside of the "
            "function that is traced (then the control flow is part of the program), or call the "
            "pullback outside of it."
        )


class Select(LinearMap):
    """Selects the subset's part of a tensor of the whole batch.

    A tensor of the subset itself is unchanged: the body may have made the tangent of a tensor that
    is selected.
    """

    def __init__(self, subset: SubsetLevel) -> None:
        self.subset = subset
        self.source: BatchLevel | None = None

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        subset = self.subset
        level = value.dispatch_level
        _refuse_trace(level)
        with level.restored():
            if level.depth > subset.depth:
                inner = value.value
                if isinstance(inner, Tracer) and inner.dispatch_level.depth >= subset.depth:
                    return rebuilt(value, linear(self, (inner,)))
                self.source = subset.root
                return rebuilt(value, wrap(inner, None, subset))
            self.source = level
            return value if level is subset else subset.physical(value.value, value.bdim, level)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        assert self.source is not None
        if self.source is self.subset:
            return (cotangent,)
        return (scatter_subset(cotangent, self.subset, self.source),)


class _Scatter(LinearMap):
    """Puts a tensor of the subset into the whole batch, with zeros for the other examples."""

    def __init__(self, subset: SubsetLevel, target: BatchLevel) -> None:
        self.subset, self.target = subset, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        subset, target = self.subset, self.target
        level = value.dispatch_level
        _refuse_trace(level)
        with level.restored():
            if level.depth > subset.depth:
                return rebuilt(value, linear(self, (at_level(value.value, subset),)))
            inner, bdim = batched_value(value, subset)
            shape = list(inner.shape)
            shape[bdim] = target.batch_size
            zeros = inner.new_zeros(shape)
            return wrap(zeros.index_add(bdim, subset.index_in(target), inner), bdim, target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (self.subset.remap(cotangent),)


def scatter_subset(value: Any, subset: SubsetLevel, target: BatchLevel) -> Any:
    """Return a tensor of an ancestor: the subset's values, and zeros for other examples."""
    return linear(_Scatter(subset, target), (at_level(value, subset),))


class Merge(LinearMap):
    """Merges tensors of subsets that partition the batch."""

    def __init__(self, parts: Sequence[SubsetLevel], target: BatchLevel) -> None:
        self.parts, self.target = parts, target

    @functools.cached_property
    def order(self) -> torch.Tensor:
        """For each example of the whole batch, its position in the concatenated parts."""
        return torch.cat([part.index_in(self.target) for part in self.parts]).argsort()

    def of(self, values: Sequence[Any]) -> Any:
        """Return one tensor of the whole batch from a tensor of each part."""
        lifted = [at_level(part.remap(v), part) for v, part in zip(values, self.parts, strict=True)]
        inmost = max((v.dispatch_level for v in lifted), key=lambda level: level.depth)
        if inmost.depth > self.target.depth:
            lifted = [
                v
                if v.dispatch_level.depth == inmost.depth
                else at_level(inmost.lift(v), self.target)
                for v in lifted
            ]
        return linear(self, lifted)

    def run(self, values: Sequence[Any]) -> Any:
        level = max((v.dispatch_level for v in values), key=lambda level: level.depth)
        _refuse_trace(level)
        with level.restored():
            if level.depth > self.target.depth:
                return self._inside(level, values)
            pairs = [batched_value(v, part) for v, part in zip(values, self.parts, strict=True)]
            to = pairs[0][1]
            inner = [v if bdim == to else v.movedim(bdim, to) for v, bdim in pairs]
            return wrap(torch.cat(inner, to).index_select(to, self.order), to, self.target)

    def _inside(self, level: TracerLevel, values: Sequence[Any]) -> Any:
        """Merge at a level inside of the subsets, by the values that its tracers wrap."""
        lifted: list[Any] = [
            v if v.dispatch_level.depth == level.depth else level.lift(v) for v in values
        ]
        batched = isinstance(level, BatchLevel) and any(v.bdim is not None for v in lifted)
        if not batched:
            inner = [v.value for v in lifted]
        else:
            assert isinstance(level, BatchLevel)
            inner = [value_batch_first(v, v.dispatch_level) for v in lifted]
        inner = [at_level(v, part) for v, part in zip(inner, self.parts, strict=True)]
        merged = linear(self, inner)
        if isinstance(level, BatchLevel):
            return wrap(merged, 0 if batched else None, level)
        return level.lift(merged)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return tuple(part.remap(cotangent) for part in self.parts)


class _Relabel(LinearMap):
    """Relabels a tensor as one of another level with the same number of examples."""

    def __init__(self, source: BatchLevel, target: BatchLevel) -> None:
        self.source, self.target = source, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level = value.dispatch_level
        _refuse_trace(level)
        if level.depth > self.target.depth:
            with level.restored():
                return rebuilt(value, linear(self, (at_level(value.value, self.source),)))
        return wrap(value.value, value.bdim, self.target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (relabel(cotangent, self.target, self.source),)


def relabel(value: Any, source: BatchLevel, target: BatchLevel) -> Any:
    """Return a value of a guarded subset as one of the whole batch; they have equal sizes."""
    if not isinstance(value, Tracer) or value.dispatch_level.depth < source.depth:
        return value
    return linear(_Relabel(source, target), (value,))
