"""Writes by masks that differ from example to example, where autograd records them.

Its formula for such a write looks up the places that the mask has, of which there are as many as
the mask's values say. So all places are written, those that the mask does not have as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.batch.selections import Selection, spread, view_of
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.tracer import METHODS, WRITERS, innermost_level
from tsfunc.ops.refusal import require

_ALL = slice(None)


def is_recorded_mask(item: Any, *others: Any) -> bool:
    """Whether autograd records a write by this mask, of which there is one for each example.

    ``others`` are what is written into, and what is written.
    """
    if not isinstance(item, BatchTracer) or item.dtype is not torch.bool:
        return False
    level = innermost_level((item, *others))
    if level is None or not level.autograd:
        return False
    value: Any = item
    while isinstance(value, BatchTracer):
        if value.bdim is not None:
            return True
        value = value.value
    return False


def write_by_mask(
    x: torch.Tensor, items: Sequence[Any], value: Any, *, accumulate: bool = False
) -> None:
    """``x[items] = value``, or ``+=``; one of the items is the mask, the others are basic ones."""
    view, mask, before = view_of(x, items)
    right = view.dim() - before - mask.dim()
    if isinstance(value, Selection):
        value = spread(value, mask, right).to(x.dtype)
    elif isinstance(value, torch.Tensor):
        value = _at_the_places(value.to(x.dtype), mask, value.dim() - right - 1)
    mask = mask.reshape(*mask.shape, *[1] * right)
    if accumulate:
        view.add_(torch.where(mask, value, 0))
    else:
        view.copy_(torch.where(mask, value, view))


def _at_the_places(value: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    """The value with a dim for each of the mask's, in place of one for what the mask picks."""
    if dim < 0:
        return value
    count = value.shape[dim]
    if count != 1:
        require(
            mask.sum() == count,
            f"shape mismatch: a value with {count} entries is written by a mask that has another "
            f"number of places for some example",
        )
        # The n-th place of the mask gets the n-th entry. Without entries any will do.
        order = mask.reshape(-1).cumsum(0) - 1
        if not count:
            value = value.new_zeros([*value.shape[:dim], 1, *value.shape[dim + 1 :]])
        value = value.index_select(dim, order.clamp(0, max(count, 1) - 1))
        spread: torch.Tensor = value.unflatten(dim, mask.shape)
        return spread
    return value.reshape(*value.shape[:dim], *[1] * mask.dim(), *value.shape[dim + 1 :])


def _index_put(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return _put(args, kwargs, inplace=False)


def _index_put_inplace(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    WRITERS[func](func, args, kwargs)
    return _put(args, kwargs, inplace=True)


def _put(args: Sequence[Any], kwargs: Mapping[str, Any], *, inplace: bool) -> Any:
    if len(args) < 3:
        return NotImplemented
    x, indices, value, *rest = args
    accumulate = kwargs.get("accumulate", bool(rest and rest[0]))
    given = [index for index in indices if index is not None]
    if len(given) != 1 or not is_recorded_mask(given[0], x, value):
        return NotImplemented
    target = x if inplace else x.clone()
    items = [_ALL if index is None else index for index in indices]
    write_by_mask(target, items, value, accumulate=accumulate)
    return target


for _function in (torch.index_put, torch.Tensor.index_put):
    METHODS[_function] = _index_put
for _function in (torch.index_put_, torch.Tensor.index_put_):
    METHODS[_function] = _index_put_inplace
