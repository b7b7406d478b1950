"""Calls of linear functions that were made outside of the body that calls them.

NOTE [pullbacks of a whole batch]
A pullback that the function of a vmap makes has saved tensors of the whole batch. In a body that
runs on an active subset it is called outside of the subset: the cotangents of the other examples
are zeros, and the body gets its examples' part of the results. A body that is traced for one
example can't call it, so its choice is traced for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from tsfunc.bridge.control.attempts import CannotUnbatch
from tsfunc.bridge.control.bodies import BodyLevel, HiddenVmap
from tsfunc.bridge.control.subset_arguments import ArgRemapper
from tsfunc.bridge.control.subsets import SubsetLevel, scatter_subset
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.level_proxies import LevelProxy, as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.dispatch.state import Level, replacing_captured_levels, tls, using


def call_where_made(
    func: Callable[[Sequence[Any]], Sequence[Any]],
    saved: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Call a linear function of tensors: NOTE [pullbacks of a whole batch].

    Args:
        saved: tensors that the function has kept, such as the outputs of the function that a
            pullback belongs to.
        values: its arguments, as the running code sees them.

    Raises:
        CannotUnbatch: the running code is traced for one example.
        NotImplementedError: a vmap in a program differentiates what the function has kept.
    """
    proxies = [level for level in tls.state.levels if isinstance(level, LevelProxy)]
    if not proxies:
        return func(values)
    of_saved = {x.dispatch_level for out in saved for x in nested_tracers(out)}
    batches = [level for level in of_saved if isinstance(level, BatchLevel)]
    for proxy in proxies:
        if isinstance(proxy, BodyLevel) and any(map(proxy.is_outside, saved)):
            _refuse_derivatives(proxy, batches)
        if isinstance(proxy, HiddenVmap) and any(x.root is proxy.root for x in batches):
            raise CannotUnbatch(proxy.parent.original.root)
    subsets = [level for level in tls.state.levels if isinstance(level, SubsetLevel)]
    wholes = {
        subset: level
        for subset in reversed(subsets)  # the innermost first
        for level in batches
        if subset.comes_from(level)
    }
    if not wholes:
        return func(values)
    masks = [_stands_for_itself(subset, level) for subset, level in wholes.items()]
    with _differentiating_as(wholes):
        for (subset, level), mask in zip(wholes.items(), masks, strict=True):
            if mask is not None:
                values = [torch.where(mask, value, 0) for value in values]
            values = [scatter_subset(value, subset, level) for value in values]
        with _outside(wholes):
            results = func(values)
        results = [as_seen_by_current_level(result) for result in results]
    for mask in masks:
        if mask is not None:  # the derivatives of an example are those of its own value
            results = [torch.where(mask, result, result.detach()) for result in results]
    return results


def _refuse_derivatives(body: BodyLevel, batches: Sequence[BatchLevel]) -> None:
    """Refuse derivatives by what a pullback has saved: a vmap's tensors are not inputs of the body.

    Raises:
        NotImplementedError: a vmap inside of the trace differentiates.
    """
    for level in batches:
        if level.depth > body.depth and (level.autograd or level.forward):
            raise NotImplementedError(
                f"{body.root.name}: a program can't differentiate a pullback or pushforward that "
                f"the function of a vmap made outside of a branch or a loop's step, and that is "
                f"called inside of it. Call vjp or linearize inside of the branch or step, or "
                f"write the choice with torch.where."
            )


def _stands_for_itself(subset: SubsetLevel, whole: BatchLevel) -> torch.Tensor | None:
    """Return True for each example that no other one stands for; None if that holds for all."""
    with subset.restored():
        mask = _mask_of(subset, whole)
    return None if mask is None else wrap(mask, 0, subset)


def _mask_of(subset: SubsetLevel, whole: BatchLevel) -> torch.Tensor | None:
    mask = as_seen_by_current_level(subset.mask)
    parent = subset.parent
    if parent is whole or not isinstance(parent, SubsetLevel):
        return cast("torch.Tensor | None", mask)
    outer = _mask_of(parent, whole)
    if outer is None:
        return cast("torch.Tensor | None", mask)
    outer = outer.index_select(0, as_seen_by_current_level(subset.index))
    return outer if mask is None else mask & outer


@contextmanager
def _differentiating_as(wholes: Mapping[SubsetLevel, BatchLevel]) -> Iterator[None]:
    """Context manager: levels of whole batches differentiate as their subsets do."""
    counts = [(whole, whole.autograd, whole.forward) for whole in wholes.values()]
    for subset, whole in wholes.items():
        whole.autograd, whole.forward = subset.autograd, subset.forward
    try:
        yield
    finally:
        for whole, autograd, forward in counts:
            whole.autograd, whole.forward = autograd, forward


@contextmanager
def _outside(wholes: Mapping[SubsetLevel, BatchLevel]) -> Iterator[None]:
    """Context manager: levels of whole batches are active in the place of their subsets."""

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple([cast("Any", wholes).get(level, level) for level in levels])

    state = tls.state
    remapper = cast("ArgRemapper | None", state.remap_args)
    while remapper is not None and remapper.subset in wholes:
        remapper = remapper.outside
    outside = state.replace(levels=seen(state.levels), remap_args=remapper)
    with replacing_captured_levels(state.levels, seen), using(outside):
        yield
