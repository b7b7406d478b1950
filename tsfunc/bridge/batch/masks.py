"""Writes by masks that differ between examples, for tensors that autograd records.

The derivative of torch's masked write looks up the selected positions, whose number depends on
the mask's values. The functions below write all positions instead, and the positions that the mask
does not select get their old values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from tsfunc.bridge.batch.selections import Selection, spread, view_of
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.function_registry import WRITERS, FunctionRules, Stage
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.bridge.tracers.tracer import innermost_level
from tsfunc.ops.refusal import require
from tsfunc.ops.registry import Args, Kwargs

_ALL = slice(None)


def is_recorded_mask(item: Any, *others: Any) -> bool:
    """True if autograd records a write by this mask and the mask is batched.

    Args:
        item: the index item that may be a mask.
        others: the tensor that is written into, and the written value.
    """
    if not isinstance(item, BatchTracer) or item.dtype is not torch.bool:
        return False
    level = innermost_level((item, *others))
    if level is None or not level.autograd:
        return False
    return any(tracer.bdim is not None for tracer in nested_tracers(item, BatchTracer))


def write_by_mask(
    x: torch.Tensor, items: Sequence[Any], value: Any, *, accumulate: bool = False
) -> None:
    """``x[items] = value``, or ``+=``, where one item is a mask and the others are basic items."""
    view, mask, before = view_of(x, items)
    right = view.dim() - before - mask.dim()
    if isinstance(value, Selection):
        value = spread(value, mask, right).to(x.dtype)
    elif isinstance(value, torch.Tensor):
        value = _expanded_to_mask(value.to(x.dtype), mask, value.dim() - right - 1)
    mask = mask.reshape((*mask.shape, *[1] * right))
    if accumulate:
        view.add_(torch.where(mask, value, 0))
    else:
        view.copy_(torch.where(mask, value, view))


def _expanded_to_mask(value: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Expand the dim of the selected elements in ``value`` to the dims of the mask.

    A dim of size 1 becomes dims of size 1, which broadcast.
    """
    if dim < 0:
        return value
    count = value.shape[dim]
    if count != 1:
        require(
            mask.sum() == count,
            f"shape mismatch: a value with {count} entries is written by a mask that has another "
            f"number of positions for some example",
        )
        # The n-th selected position gets the n-th entry. For no entries, any value serves.
        order = mask.reshape(-1).cumsum(0) - 1
        if not count:
            value = value.new_zeros([*value.shape[:dim], 1, *value.shape[dim + 1 :]])
        value = value.index_select(dim, order.clamp(0, max(count, 1) - 1))
        return value.unflatten(dim, mask.shape)
    return value.reshape((*value.shape[:dim], *[1] * mask.dim(), *value.shape[dim + 1 :]))


def _index_put(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    return _put_masked(args, kwargs, inplace=False)


def _index_put_inplace(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    WRITERS[func](func, args, kwargs)
    return _put_masked(args, kwargs, inplace=True)


def _put_masked(args: Args, kwargs: Kwargs, *, inplace: bool) -> Any:
    if len(args) < 3:
        return NotImplemented
    x, indices, value, *rest = args
    accumulate = kwargs.get("accumulate", bool(rest and rest[0]))
    present = [index for index in indices if index is not None]
    if len(present) != 1 or not is_recorded_mask(present[0], x, value):
        return NotImplemented
    target = x if inplace else x.clone()
    items = [_ALL if index is None else index for index in indices]
    write_by_mask(target, items, value, accumulate=accumulate)
    return target


def _has_indices(kinds: Sequence[Any]) -> bool:
    """True for indices of tensors and None."""
    kind = kinds[1] if len(kinds) > 1 else None
    return type(kind) is tuple and all(
        kind is None or type(kind) is int or kind in _INDICES for kind in kind[1:]
    )


_INDICES: Final = frozenset({torch.Tensor, type(None)})

function_rules: Final = FunctionRules()
for _rule, _functions in (
    (_index_put, (torch.index_put, torch.Tensor.index_put)),
    (_index_put_inplace, (torch.index_put_, torch.Tensor.index_put_)),
):
    function_rules.add(Stage.METHOD, _rule, *_functions, left_to_torch=_has_indices, positions=True)
