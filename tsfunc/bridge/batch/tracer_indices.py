"""``x[i]``, ``x[i:i + 1]`` and ``x[i] = v`` with a tracer ``i`` that has a value for each example.

Python's indexing reads the value of an integer tensor without dims, to select or slice with it. A
tracer has no single value, so such items are served by tensor operators: each item becomes an
index tensor along its dim, with one position or as many as the slice has.

The result of a read is a view of ``x``, as with an int: NOTE [gathered views].

The size of a slice must be the same for every example. The size is computed from the values of all
examples; if these differ, the slice raises a ``DataDependentError``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from tsfunc.bridge.batch.masks import is_recorded_mask, write_by_mask
from tsfunc.bridge.batch.selections import is_lazy, select
from tsfunc.bridge.sizes.sized_indexing import basic_view, depends_on_sizes, is_traced_here
from tsfunc.bridge.trace.trace_level import TraceTracer
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.function_registry import WRITERS, FunctionRules, Stage
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.nesting import innermost_value, nested_tracers
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.bridge.writing.emulated_views import gather
from tsfunc.dispatch.messages import SPLIT
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import wrap_dim
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.ops.shifts import Shift
from tsfunc.user_code import user_location

_T = torch.Tensor
_ALL = slice(None)


def _is_scalar(item: Any) -> bool:
    return (
        isinstance(item, Tracer)
        and item.dim() == 0
        and not (item.is_floating_point() or item.is_complex() or item.dtype is torch.bool)
    )


def _as_known_int(item: Any) -> Any:
    """Replace an index that has one value for all examples by the int."""
    if isinstance(item, slice):
        return (
            slice(_as_known_int(item.start), _as_known_int(item.stop), item.step)
            if _is_traced(item)
            else item
        )
    if isinstance(item, list) and any(isinstance(part, Tracer) for part in item):
        # A list acts as a tensor of its items; Python can't build that tensor from tracers.
        return torch.stack([torch.as_tensor(part) for part in item])
    number = _known_number(item) if _is_scalar(item) else None
    return item if number is None else number


def _known_number(item: Tracer) -> Any:
    """Return the number of a tensor without dims, or None if it is not one number for all work."""
    value: Any = item
    while isinstance(value, BatchTracer | GradTracer) and getattr(value, "bdim", None) is None:
        value = value.value
    if type(value) is TraceTracer:
        return value.known_number()
    return value.item() if type(value) is torch.Tensor else None


def _is_flag(item: Any) -> bool:
    """True for a bool tracer without dims whose value differs between examples, or is unknown."""
    if not isinstance(item, Tracer) or item.dim() or item.dtype is not torch.bool:
        return False
    return _known_number(item) is None


def _is_bound_by_tracers(item: Any) -> bool:
    return isinstance(item, slice) and (_is_scalar(item.start) or _is_scalar(item.stop))


def _is_traced(item: Any) -> bool:
    return _is_scalar(item) or _is_bound_by_tracers(item)


def _is_advanced(item: Any) -> bool:
    return isinstance(item, torch.Tensor | list | tuple | bool)


def _consumed_dims(item: Any) -> int:
    """Return the number of dims of the indexed tensor that an index item consumes."""
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return len(_mask_shape(item)) or 1


def _mask_shape(item: Any) -> tuple[int, ...]:
    """Return the shape of a list of bools, which can have lists in it; () for any other item."""
    if not isinstance(item, list | tuple) or not item:
        return ()
    if all(type(part) is bool for part in item):
        return (len(item),)
    shapes = {_mask_shape(part) for part in item}
    return (len(item), *shapes.pop()) if len(shapes) == 1 and () not in shapes else ()


def _with_positions(x: torch.Tensor, index: Any) -> tuple[Any, ...] | None:
    """Replace lists of bools by the positions of their True items; None for any other index.

    torch would make a tensor of the list, and the number of its True elements would be unknown in
    a trace. A list that does not have the sizes of ``x`` is left to torch, which raises.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not any(map(_mask_shape, entries)) or (entries[0] is index and len(_mask_shape(index)) > 1):
        return None
    items: list[Any] = []
    dim = 0
    for item in _index_items(entries, x.dim()):
        shape, count = _mask_shape(item), _consumed_dims(item)
        if not shape:
            items.append(item)
        elif tuple(x.shape[dim : dim + count]) == shape:
            places = itertools.product(*map(range, shape))
            chosen = [place for place in places if functools.reduce(operator.getitem, place, item)]
            items += map(list, zip(*chosen, strict=True)) if chosen else [[]] * count
        else:
            return None
        dim += count
    return tuple(items)


def _index_items(index: Any, rank: int) -> list[Any]:
    """Return the items of an index with Ellipsis expanded, so that they cover all dims."""
    items = list(index) if isinstance(index, tuple) else [index]
    rest = [_ALL] * (rank - sum(_consumed_dims(item) for item in items if item is not Ellipsis))
    for position, item in enumerate(items):
        if item is Ellipsis:
            return [*items[:position], *rest, *items[position + 1 :]]
    return [*items, *rest]


def _item_positions(item: Any, size: int) -> torch.Tensor:
    """Return the positions along a dim of ``size`` that an item selects; an int may be negative."""
    if not isinstance(item, slice):
        return item
    like = item.start if isinstance(item.start, Tracer) else item.stop
    step = 1 if item.step is None else item.step
    start = _as_bound(item.start, 0, size, like)
    stop = _as_bound(item.stop, size, size, like)
    count = _common_count(torch.clamp(stop - start + (step - 1), min=0) // step)
    return start + torch.arange(count, device=like.device) * step


def _as_bound(bound: Any, default: int, size: int, like: torch.Tensor) -> torch.Tensor:
    value = torch.as_tensor(default if bound is None else bound, device=like.device)
    return torch.where(value < 0, value + size, value).clamp(0, size)


def _common_count(counts: Any) -> int:
    """Return the size of a slice, which must be the same for all examples of all vmaps.

    Raises:
        DataDependentError: the sizes differ, and a level with such a batch can't split it.
    """
    every = innermost_value(counts, BatchTracer)
    splits = all(
        tracer.bdim is None or tracer.dispatch_level.splitter is not None
        for tracer in nested_tracers(counts, BatchTracer)
    )
    if isinstance(every, Tracer) or every.numel() == 0:
        return int(every.min()) if every.numel() else 0
    low, high = int(every.min()), int(every.max())
    if low == high:
        return low
    if splits:
        return int(counts)
    raise DataDependentError(
        f"vmap, at {user_location()}: x[start:stop] with bounds that differ from example to "
        f"example has between {low} and {high} elements, so the size of the result would differ "
        f"too. Slices of one size for all work (x[i : i + 2], where every i + 2 is within x); else "
        f"use torch.where or a mask. {SPLIT}."
    )


def _get(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    if type(index) is list and any(isinstance(item, Tracer) for item in index):
        index = tuple(index)  # as torch reads a list that contains tensors
    if (places := _with_positions(x, index)) is not None:
        return x[places]
    entries = index if isinstance(index, tuple) else (index,)
    if not any(_is_traced(item) or type(item) is list for item in entries):
        items = masked_items(x, index)
        if items is not None:
            return select(x, items)
        if any(_is_flag(item) for item in entries):
            x, entries = _with_masks(x, entries)
            return x[entries]
        if not is_traced_here() or not depends_on_sizes(x, entries):
            return NotImplemented
        view, left = basic_view(x, _index_items(index, x.dim()), _consumed_dims)
        return view[tuple(left)] if left else view
    integers = tuple([_as_known_int(item) for item in entries])
    if not any(_is_traced(item) for item in integers):
        same = all(a is b for a, b in zip(entries, integers, strict=True))
        return NotImplemented if same else x[integers]
    items = _index_items(integers, x.dim())
    for position in reversed(range(len(items))):
        if _is_traced(items[position]):
            x = _gather(x, items, position)
    return x[tuple(items)] if items else x


def masked_items(x: torch.Tensor, index: Any) -> list[Any] | None:
    """Return the items of an index with one lazy mask and basic items; None for other indices."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(is_lazy(item) for item in entries) or sum(map(_is_advanced, entries)) != 1:
        return None
    return _index_items(index, x.dim())


def _arguments(args: Args, kwargs: Kwargs, *names: str) -> Sequence[Any]:
    """Return the input and the arguments with these names, None for each missing one."""
    positions = enumerate(("input", *names))
    return [args[k] if k < len(args) else kwargs.get(name) for k, name in positions]


def _select(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """``select(x, dim, index)`` with a traced index."""
    x, dim, index = _arguments(args, kwargs, "dim", "index")
    if not _is_scalar(index):
        return NotImplemented
    index = _as_known_int(index)
    if isinstance(index, int):
        return x.select(dim, index)
    return gather(x, wrap_dim(dim, x.dim()), index)


def _masked_select(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """``masked_select(x, mask)`` with a mask that differs between examples."""
    x, mask = _arguments(args, kwargs, "mask")
    if not is_lazy(mask) or "out" in kwargs:
        return NotImplemented
    x, mask = torch.broadcast_tensors(x, mask)
    return select(x, [mask])


def _tensor_split(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """``tensor_split(x, indices, dim)`` with traced indices, which C++ would read from memory."""
    named = "tensor_indices_or_sections"
    where = args[1] if len(args) > 1 else kwargs.get("indices_or_sections", kwargs.get(named))
    if not isinstance(where, Tracer):
        return NotImplemented
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return torch.tensor_split(args[0] if args else kwargs["input"], where.tolist(), dim)


def _gather(x: torch.Tensor, items: list[Any], position: int) -> torch.Tensor:
    """Gather one traced item from ``x`` and update ``items`` for the dims of the result."""
    item = items.pop(position)
    dim = sum(_consumed_dims(item) for item in items[:position])
    positions = _item_positions(item, x.shape[dim])
    if positions.dim():
        items.insert(position, _ALL)
    return gather(x, dim, positions)


def _set(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    WRITERS[func](func, args, kwargs)
    x, index, value = args
    if (places := _with_positions(x, index)) is not None:
        x[places] = value
        return None
    entries = index if isinstance(index, tuple) else (index,)
    if any(_is_flag(item) for item in entries):
        return _set_by_mask(*_with_masks(x, entries), value)
    if sum(map(_is_advanced, entries)) == 1 and any(is_recorded_mask(i, x, value) for i in entries):
        write_by_mask(x, _index_items(index, x.dim()), value)
        return None
    if not any(_is_traced(item) for item in entries):
        if not is_traced_here() or not depends_on_sizes(x, entries):
            return NotImplemented
        view, left = basic_view(x, _index_items(index, x.dim()), _consumed_dims)
        view[tuple(left) or Ellipsis] = value
        return None
    integers = tuple([_as_known_int(item) for item in entries])
    if not any(_is_traced(item) for item in integers):
        x[integers] = value  # a view, as in a read: the value may be the same view
        return None
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    items = _index_items(index, x.dim())
    if any(_is_advanced(item) and not _is_scalar(item) for item in items):
        # Gather the part that the traced items select, write into a clone of it, and put it back.
        chosen: list[Any] = []
        for item in items:
            chosen += [item] if _is_traced(item) else [_ALL] * _consumed_dims(item)
        part = _get(func, types, (x, tuple(chosen)), {}).clone()
        rest = [_ALL if _is_bound_by_tracers(i) else i for i in items if not _is_scalar(i)]
        part[tuple(rest)] = value
        items, value = chosen, part
    _put_at_items(x, items, value)
    return None


def _with_masks(x: torch.Tensor, entries: Sequence[Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Replace bool tracers without dims by one mask along a new dim of size 1, their meaning."""
    flags = [item for item in entries if _is_flag(item)]
    mask = functools.reduce(torch.logical_and, flags).reshape(1)
    items = _index_items(tuple(entries), x.dim())
    places = [k for k, item in enumerate(items) if _is_flag(item)]
    adjacent = places[-1] - places[0] < len(places)
    first = places[0] if adjacent else 0  # torch puts the dim of separate items first
    dim = sum(_consumed_dims(item) for item in items[:first] if item is not None)
    rest = [None if _is_flag(item) else [item] for item in items]
    rest.insert(first, [mask])
    return x.unsqueeze(dim), tuple(item for part in rest if part for item in part)


def _set_by_mask(x: torch.Tensor, entries: tuple[Any, ...], value: Any) -> None:
    """``x[given] = value``; a value for each selected element is left to torch's operator."""
    items = _index_items(entries, x.dim())
    advanced = [k for k, item in enumerate(items) if _is_advanced(item) or _is_traced(item)]
    right = sum(item is None or isinstance(item, slice) for item in items[advanced[0] :])
    rank = value.dim() if isinstance(value, torch.Tensor) else 0
    if len(advanced) == 1 and (rank <= right or isinstance(value.shape[-right - 1], int)):
        write_by_mask(x, items, value)
    else:
        x[entries] = value


def _without_leading_ones(value: torch.Tensor, rank: int) -> torch.Tensor:
    while value.dim() > rank and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def _put_at_items(x: torch.Tensor, items: Sequence[Any], value: torch.Tensor) -> None:
    """Write ``value`` to the elements that ints, slices and traced items select."""
    # A view with the dims of the traced items kept whole.
    view = x[tuple(_ALL if _is_traced(item) else item for item in items)]
    items_of_dims = [
        item for item in items if item is None or isinstance(item, slice) or _is_traced(item)
    ]
    dims = [dim for dim, item in enumerate(items_of_dims) if _is_traced(item)]
    positions = [_item_positions(items_of_dims[dim], view.shape[dim]) for dim in dims]
    shape: list[int] = []  # the shape of the written part, and the dims of slices in it
    spans: list[int] = []
    for dim, size in enumerate(view.shape):
        position = positions[dims.index(dim)] if dim in dims else None
        if position is None:
            shape.append(size)
        elif position.dim():
            spans.append(len(shape))
            shape.append(position.shape[0])
    value = _without_leading_ones(value.to(x.dtype), len(shape)).expand(shape)
    value = value.movedim(spans, list(range(len(spans))))
    after = len(spans)
    for k, position in enumerate(positions):
        if position.dim():
            after -= 1
            positions[k] = position.view(-1, *[1] * after)
    view.movedim(dims, list(range(len(dims)))).index_put_(tuple(positions), value)


def _has_plain_index(kinds: Sequence[Any]) -> bool:
    """True for an index of ints, slices, None, an ellipsis and plain tensors, or a list of ints."""
    kind = kinds[1]
    if type(kind) is tuple:
        items = kind[1] if type(kind[1]) is frozenset else kind[1:]
        return kind[0] is tuple and _PLAIN.issuperset(items)
    return kind in _PLAIN or kind is tuple or kind is list


def _has_index(kinds: Sequence[Any]) -> bool:
    """The same for an index that may have tracers too, if these are positions."""
    kind = kinds[1]
    if type(kind) is tuple and type(kind[1]) is not frozenset:
        return kind[0] is tuple and all(map(_is_item, kind[1:]))
    return _is_item(kind) or _has_plain_index(kinds)


def _is_item(kind: Any) -> bool:
    return kind is None or type(kind) is int or kind in _PLAIN


_PLAIN: Final = frozenset({int, slice, type(None), type(Ellipsis), torch.Tensor})
_INDEX: Final = (int(Shift.INDEX),)

function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD, _get, _T.__getitem__, left_to_torch=_has_index, shifts=_INDEX, positions=True
)
function_rules.add(
    Stage.METHOD, _set, _T.__setitem__, left_to_torch=_has_plain_index, shifts=_INDEX
)
function_rules.add(Stage.METHOD, _masked_select, _T.masked_select, torch.masked_select)
function_rules.add(Stage.METHOD, _select, _T.select, torch.select, numbers=True)
function_rules.add(Stage.METHOD, _tensor_split, _T.tensor_split, torch.tensor_split, numbers=True)
