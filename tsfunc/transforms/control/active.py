"""Choices and loops that differ among the examples: each body runs on the examples that need it.

:func:`groups_by_choice` and :func:`repeat` select the examples, and a group merges the results.
There are two kinds of groups. A :class:`SubsetGroup` runs the user's functions on tracers: NOTE
[active subsets] in ``bridge/control/subsets``. A ``physical_batches.PhysicalBatch`` runs the graphs
of a program on plain tensors: NOTE [batched bodies] in ``physical_batches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from tsfunc.bridge.control.subsets import Merge, SubsetLevel, in_subset, run_in_subset, subset_of
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.draw_keys import merge_draw_counts, set_draw_counts
from tsfunc.transforms.control.outputs import combine_leaves, numbers_to_tensors

G = TypeVar("G", bound="Group")


class Group(Protocol):
    """Examples of a batch that run together."""

    @property
    def size(self) -> int:
        """The number of examples."""

    def select(self: G, index: torch.Tensor, *, single: bool = False) -> G:
        """Return the group of the examples at these positions; ``single`` as for a subset."""

    def select_state(self, state: Any) -> Any:
        """Return the part of a state of the group that this one was selected from."""

    def merge_states(self: G, parts: Sequence[tuple[G, Any]]) -> Any:
        """Return the state of all examples, from groups of them with their states."""


def numbers_in(index: torch.Tensor) -> list[int]:
    """Return the different values of an index, in order."""
    return torch.unique(index).tolist()


def groups_by_choice(
    whole: G, index: torch.Tensor, numbers: Sequence[int]
) -> Iterator[tuple[int, G]]:
    """Yield each number with the group of the examples that choose it."""
    for i in numbers:
        here = len(numbers) > 1
        yield i, whole.select((index == i).nonzero().squeeze(1)) if here else whole


def repeat(
    whole: G,
    state: Any,
    active: torch.Tensor,
    step: Callable[[G, Any, int | None], tuple[Any, int, Any]],
    limit: int | None = None,
) -> tuple[Any, bool]:
    """Make steps on the examples that continue, until none does.

    Args:
        active: for each example, True if it makes the first step.
        step: takes a group, its state and the most steps to make; makes steps as long as all
            examples of the group continue. Returns the next state, the number of steps made, and
            one of these: a mask of the examples that continue; True if the loop has ended for all;
            False if all have made the most steps.
        limit: the most steps of an example; by default any number.

    Returns:
        The last state of all examples, and True if none continues.
    """
    group, steps = whole, 0
    finished: list[tuple[G, Any]] = []
    while True:
        going = active.nonzero().squeeze(1)
        count = going.shape[0]
        if not count or steps == limit:
            return whole.merge_states([*finished, (group, state)]), not count
        if count < group.size:
            gone = group.select((~active).nonzero().squeeze(1))
            finished.append((gone, gone.select_state(state)))
            # Batched values raise the errors of a step on tracers.
            group = group.select(going, single=count == 1 and steps > 0)
            state = group.select_state(state)
        left = None if limit is None else limit - steps
        state, more, active = step(group, state, left)
        steps += more
        if isinstance(active, bool):
            return whole.merge_states([*finished, (group, state)]), active


class SubsetGroup:
    """Examples of a vmap, which run on tracers of its level or of a subset's.

    The state is a pair: a pytree of tensors, and the numbers of draws of the examples.

    Attributes:
        label: the name of the control flow in errors.
    """

    def __init__(self, label: str, level: BatchLevel) -> None:
        self.label, self.level = label, level

    @property
    def size(self) -> int:
        return self.level.batch_size

    def select(self, index: torch.Tensor, *, single: bool = False) -> SubsetGroup:
        return SubsetGroup(self.label, subset_of(self.level, index, single))

    def select_state(self, state: Any) -> Any:
        assert isinstance(self.level, SubsetLevel)
        return self.level.of_parent(self.label, state)

    def merge_states(self, parts: Sequence[tuple[SubsetGroup, Any]]) -> Any:
        trees, counts = zip(*[state for _, state in parts], strict=True)
        if len(parts) == 1:
            set_draw_counts(counts[0])
            return numbers_to_tensors(trees[0])
        subsets = [group.level for group, _ in parts if isinstance(group.level, SubsetLevel)]
        merge = Merge(subsets, self.level).of
        merge_draw_counts(counts, merge)
        return combine_leaves(trees, merge)

    def running(self, roots: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager whose block runs on these examples alone; see ``in_subset``."""
        level = self.level
        if isinstance(level, SubsetLevel):
            return in_subset(level, self.label, roots)
        return nullcontext()

    def run(self, func: Callable[..., Any], args: Any) -> Any:
        """Call a function on the examples' part of its arguments."""
        level = self.level
        if isinstance(level, SubsetLevel):
            return run_in_subset(level, self.label, func, args)
        return func(*args)
