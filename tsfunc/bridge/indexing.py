"""``x[i]`` and ``x[i] = v`` where ``i`` is a number for each example.

Python's indexing asks an integer tensor without dims for its value, to select with it. A tracer
has a value for each example: so these are selected by tensor operators before the rest is indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.tracer import METHODS, Tracer

_T = torch.Tensor


def _is_scalar(item: Any) -> bool:
    return (
        isinstance(item, Tracer)
        and item.dim() == 0
        and not (item.is_floating_point() or item.is_complex() or item.dtype is torch.bool)
    )


def _consumed(item: Any) -> int:
    """How many dims of the indexed tensor an item of an index stands for."""
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _dim_of(items: Sequence[Any], place: int, rank: int) -> int:
    """Which dim of the tensor the item at a place is for."""
    if any(item is Ellipsis for item in items[:place]):
        return rank - sum(_consumed(item) for item in items[place:])
    return sum(_consumed(item) for item in items[:place])


def _from_front(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)


def _items(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _get(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    x, index = args
    items = _items(index)
    scalars = [place for place, item in enumerate(items) if _is_scalar(item)]
    if not scalars:
        return NotImplemented
    for place in reversed(scalars):
        dim = _dim_of(items, place, x.dim())
        chosen = _from_front(items.pop(place), x.shape[dim])
        x = torch.index_select(x, dim, chosen.view(1)).squeeze(dim)
    return x[tuple(items)] if items else x


def _set(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    x, index, value = args
    items = _items(index)
    scalars = [place for place, item in enumerate(items) if _is_scalar(item)]
    rest = [item for place, item in enumerate(items) if place not in scalars]
    if not scalars or any(isinstance(item, torch.Tensor | list | bool) for item in rest):
        return NotImplemented
    # A view with the dims selected from in front: writing into it writes into x.
    chosen = []
    for order, place in enumerate(scalars):
        dim = _dim_of(items, place, x.dim())
        chosen.append(_from_front(items[place], x.shape[dim]))
        x = x.movedim(dim, order)
        items.insert(order, items.pop(place))
    items[: len(scalars)] = [slice(None)] * len(scalars)
    view = x[tuple(items)]
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    view.index_put_(tuple(chosen), value.to(x.dtype))
    return None


METHODS[_T.__getitem__] = _get
METHODS[_T.__setitem__] = _set
