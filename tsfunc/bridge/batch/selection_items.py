"""Indexing, concatenation and writes of selections: NOTE [selections] in ``selections``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from tsfunc.bridge.batch.masks import write_by_mask
from tsfunc.bridge.batch.selections import (
    Selection,
    SelectionRules,
    arguments_by_name,
    is_in_place,
    together,
)
from tsfunc.bridge.batch.tracer_indices import masked_items
from tsfunc.bridge.tracers.function_registry import WRITERS
from tsfunc.bridge.tracers.operators import objects_in
from tsfunc.ops.dims import wrap_dim
from tsfunc.ops.refusal import require
from tsfunc.ops.registry import Kwargs

_T = torch.Tensor
_ALL = slice(None)


def _get(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """``selection[mask]``, ``selection[:, 0]`` and ``table[selection]``."""
    x, index = args
    items = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Selection):
        if len(items) != 1 or items[0].dtype is torch.bool:
            return NotImplemented
        return index.like(x[items[0].elements], items[0].after + x.dim() - 1)
    if isinstance(index, Selection):
        return _restrict(x, index)
    front = x.elements.dim() + x.element_dim
    if not all(item is None or item is ... or isinstance(item, int | slice) for item in items):
        return NotImplemented
    return _basic(x, items, front)


def _restrict(x: Selection, by: Selection) -> Any:
    """Restrict a selection to the selected elements for which the selection ``by`` is True."""
    if by.dtype is not torch.bool or by.after or by.elements.dim() != 1 or not x.is_first:
        return NotImplemented
    flags = by.in_order_of(x.mask, x.source)
    out = x.like(x.elements)
    out.mask, out.source = x.mask & flags, None
    return out


def _select_one(x: Selection, number: int) -> torch.Tensor:
    """Return one selected element, counted from the front or, for negative numbers, the end."""
    count = x.count()
    least = number + 1 if number >= 0 else -number
    require(count >= least, f"index {number} is out of bounds for the selection of a mask")
    order = (~x.mask).byte().argsort(stable=True)
    ordinal = torch.full_like(count, number) if number >= 0 else count + number
    position = order.index_select(0, ordinal.reshape(1))
    return x.elements.index_select(x.element_dim, position).squeeze(x.element_dim)


def _basic(x: Selection, items: Sequence[Any], front: int) -> Any:
    """Index with ints, slices and None; the dim of the elements is kept, or takes a leading int."""
    whole = [*items]
    if ... in whole:
        position = whole.index(...)
        used = sum(1 for item in whole if item is not None) - 1
        whole[position : position + 1] = [_ALL] * (x.elements.dim() - used)
    dim = 0
    for k, item in enumerate(whole):
        if item is not None and dim == front:
            if isinstance(item, int) and k == 0:
                return _select_one(x, item)[tuple(whole[1:])]
            if item != _ALL:
                return NotImplemented
            behind = whole[k + 1 :]
            removed = sum(isinstance(i, int) for i in behind)
            return x.like(x.elements[tuple(whole)], x.after - removed + behind.count(None))
        dim += item is not None
    return x.like(x.elements[tuple(whole)])


def _set(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """``x[mask] = selection``, or ``selection[mask] = value``."""
    x, index, value = args
    if isinstance(x, Selection):
        if not isinstance(index, Selection) or index.dtype is not torch.bool:
            return NotImplemented
        lead, (elements, flags, value) = together([x, index, value], func.__name__)
        if not isinstance(value, torch.Tensor) or value.dim() <= lead.after:
            elements.copy_(torch.where(flags, value, elements))
            return None
        return NotImplemented
    items = masked_items(x, index)
    if items is None:
        return NotImplemented
    WRITERS[func](func, args, kwargs)
    write_by_mask(x, items, value)
    return None


def _index_put(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """``x.index_put_((mask,), selection)``, or ``index_put``."""
    by_name = arguments_by_name(args, kwargs, "indices", "values", "accumulate")
    x, index, value = args[0], tuple(by_name["indices"]), by_name["values"]
    items = None if isinstance(x, Selection) else masked_items(x, index)
    if items is None:
        return NotImplemented
    if is_in_place(func.__name__):
        WRITERS[func](func, args, kwargs)
    else:
        x = x.clone()
    write_by_mask(x, items, value, accumulate=by_name.get("accumulate", False))
    return x


def _flatten(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Flatten a selection into one dim of elements."""
    x, *shape = args
    if func.__name__ in ("reshape", "view") and shape not in ([-1], [(-1,)], [[-1]]):
        return NotImplemented
    if func.__name__ == "flatten" and (shape or kwargs):
        return NotImplemented
    mask = x.column().expand_as(x.elements).reshape(-1)
    return (
        x.like(x.elements.reshape(-1), 0)
        if x.elements.dim() == 1
        else _selection_like(x, x.elements.reshape(-1), mask)
    )


def _selection_like(x: Selection, elements: torch.Tensor, mask: torch.Tensor) -> Any:
    out = x.like(elements, 0 if elements.dim() == 1 else None)
    out.mask, out.source = mask, None
    return out


def _cat(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """``cat`` along the dim of the elements; the elements of plain tensors are all selected."""
    parts, dim = args[0], arguments_by_name(args, kwargs, "dim").get("dim", 0)
    lead = next(objects_in(Selection, parts))
    elements, masks = [], []
    for part in parts:
        if isinstance(part, Selection):
            if part.after != lead.after:
                return NotImplemented
            elements.append(part.elements)
            masks.append(part.mask)
        else:
            elements.append(part)
            masks.append(lead.mask.new_ones(part.shape[dim]))
    if wrap_dim(dim, lead.elements.dim()) != lead.element_dim + lead.elements.dim():
        return NotImplemented
    return _selection_like(lead, torch.cat(elements, dim), torch.cat(masks))


def _masked_select(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x, mask = (*args, *kwargs.values())
    if not isinstance(x, Selection) or not isinstance(mask, Selection):
        return NotImplemented
    return _restrict(x, mask)


def _text(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Return the text for people; a format spec would format a number."""
    return NotImplemented if any(args[1:]) else args[0].describe()


function_rules: Final = SelectionRules()
function_rules.serve(_text, "__repr__ __format__", _T)
function_rules.serve(_flatten, "flatten ravel reshape view")
function_rules.serve(_cat, "cat concat concatenate")
function_rules.serve(_masked_select, "masked_select")
function_rules.serve(_index_put, "index_put index_put_")
function_rules.serve(_get, "__getitem__", _T)
function_rules.serve(_set, "__setitem__", _T)
