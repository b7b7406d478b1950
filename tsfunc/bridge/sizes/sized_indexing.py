"""Basic indexing in a trace: ints and slices become ``select`` and ``slice`` calls, item by item.

torch's own indexing reads the value of a symbolic int, and tests whether a slice covers a whole
dim. Both would add guards on the sizes of the call (NOTE [slices of named dims] in
``shape_rules``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.user_queries import has_symbols
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.state import tls
from tsfunc.ops.registry import Args, Kwargs

_ALL = slice(None)


def is_traced_here() -> bool:
    """True if the running code is being traced."""
    levels = tls.state.levels
    return bool(levels) and levels[0].key is DispatchKey.Trace


def depends_on_sizes(x: torch.Tensor, items: Sequence[Any]) -> bool:
    """True if an index has symbolic numbers, or takes parts of a tensor with symbolic sizes."""
    named = has_symbols(x.shape)
    return any(
        isinstance(item, torch.SymInt)
        or (named and type(item) is int)
        or (_is_part(item) and (named or has_symbols((item.start, item.stop))))
        for item in items
    ) and all(_is_served(item) for item in items)


def _is_part(item: Any) -> bool:
    return isinstance(item, slice) and not (item.start is item.stop is None)


def _is_served(item: Any) -> bool:
    """True if an item is not a slice, or a slice with int bounds and a positive step."""
    if not isinstance(item, slice):
        return True
    numbers = all(
        bound is None or type(bound) is int or isinstance(bound, torch.SymInt)
        for bound in (item.start, item.stop)
    )
    return numbers and (item.step is None or (type(item.step) is int and item.step > 0))


def basic_view(
    x: torch.Tensor, items: Sequence[Any], consumed: Any
) -> tuple[torch.Tensor, list[Any]]:
    """Return the view for the basic items of an index, and the remaining index for that view.

    Args:
        items: the items of its index, without Ellipsis.
        consumed: returns the number of dims that an item indexes.
    """
    left: list[Any] = []
    dim = 0
    for item in items:
        if type(item) is int or isinstance(item, torch.SymInt):
            x = x.select(dim, item)
            continue
        if item is None:
            x = x.unsqueeze(dim)
        elif _is_part(item):
            x = _slice(x, dim, item)
        elif isinstance(item, slice):
            x = x if item.step in (None, 1) else _slice(x, dim, item)
        else:
            left.append(item)
            dim += consumed(item)
            continue
        left.append(_ALL)
        dim += 1
    while left and left[-1] is _ALL:
        left.pop()
    return x, left


def _slice(x: torch.Tensor, dim: int, item: slice) -> torch.Tensor:
    return torch.ops.aten.slice.Tensor(
        x, dim, item.start, item.stop, 1 if item.step is None else item.step
    )


# --- indexing calls on fake tensors

PARTS: Final = frozenset({"aten::select.int", "aten::slice.Tensor"})


def part_from_start(
    op: TorchOperator, args: Args, kwargs: Kwargs
) -> tuple[tuple[Any, ...], int] | None:
    """Return an indexing call moved to begin at 0, and the storage offset that it was moved by.

    None if the call begins at 0 already, or if it may begin outside of the tensor.
    """
    if kwargs or len(args) < 3:
        return None
    x, dim, start = args[:3]
    if type(x) is not FakeTensor or type(dim) is not int or type(start) is not int:
        return None
    if not -x.dim() <= dim < x.dim() or x.layout is not torch.strided:
        return None
    size, stride = x.shape[dim], x.stride()[dim]
    if not type(size) is type(stride) is int or not 0 < start < size:
        return None
    if op.name == "aten::select.int":
        return (x, dim, 0), start * stride
    stop = args[3] if len(args) > 3 else None
    stop = size if stop is None else stop
    if type(stop) is not int or not start <= stop <= size:
        return None
    return (x, dim, 0, stop - start, *args[4:]), start * stride
