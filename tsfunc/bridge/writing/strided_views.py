"""``as_strided`` of results whose batch has another memory layout than one example.

NOTE [strides of one example]
``as_strided`` addresses memory. The memory of an argument of vmap is the user's: a view of one
example addresses the same elements in the loop over the examples. The memory of an operator's
result is laid out for the batch, and the batch dim may be inside of the example's dims. Strides
read from the tensor (``x.stride()``) then describe this layout, and strides written by hand
describe the layout that one example has in the loop. A view is taken if it addresses elements of
its own example alone, and if it can't be meant as a view of the other layout; other views are
refused. After ``contiguous()`` the two layouts are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.bridge.tracers.torch_state import in_backward_formula
from tsfunc.bridge.writing.reshaped_views import is_argument, memory_under_views, strides_alone
from tsfunc.bridge.writing.reshaping import reshape_in_place
from tsfunc.ops.registry import Args, Kwargs


def _as_strided(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse a view with another meaning than for one example; torch is called next."""
    if not in_backward_formula():
        _check_view(*args, **kwargs)
    return NotImplemented


def _as_strided_in_place(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the tensor the view, unless the view has another meaning than for one example."""
    _check_view(*args, **kwargs)
    return reshape_in_place(func, types, args, kwargs)


def _scatter(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse a scatter into a view with another meaning than for one example; torch is next."""
    if not in_backward_formula():
        x, *rest = args
        positional = rest if "src" in kwargs else rest[1:]
        named = {name: value for name, value in kwargs.items() if name != "src"}
        _check_view(x, *positional, **named, writes=True)
    return NotImplemented


def _check_view(
    input: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any = None,
    *,
    out: Any = None,
    writes: bool = False,
) -> None:
    """Raise if a view of a tracer has another meaning than a view of one example.

    Args:
        input, size, stride, storage_offset, out: the arguments of ``as_strided``, and of its copy,
            whose layout does not matter.
        writes: True if a copy of the memory is written, which all examples share.

    Raises:
        RuntimeError: the view addresses elements of other examples, or has two meanings.
    """
    for tracer in nested_tracers(input):
        if isinstance(tracer, BatchTracer) and _is_interleaved(tracer):
            _check_level(tracer, tuple(size), tuple(stride), storage_offset, writes)


def _is_interleaved(x: BatchTracer) -> bool:
    """True if elements of other examples lie between the elements of one example."""
    if x.bdim is None:
        return False
    with DisableTorchFunctionSubclass():
        shape, strides = tuple(x.value.shape), list(x.value.stride())
    if any(type(number) is not int for number in (*shape, *strides)) or 0 in shape:
        return False
    step, examples = strides[x.bdim], shape[x.bdim]
    inside = zip(shape, strides, range(len(shape)), strict=True)
    span = sum((size - 1) * stride for size, stride, dim in inside if dim != x.bdim)
    return examples > 1 and 0 < step <= span


def _check_level(
    x: BatchTracer, size: tuple[Any, ...], stride: tuple[Any, ...], offset: Any, writes: bool
) -> None:
    numbers = (*size, *stride, 0 if offset is None else offset)
    if len(size) != len(stride) or any(type(n) is not int for n in numbers) or 0 in size:
        return  # the rule refuses lengths; symbolic numbers are not checked
    own_layout = is_argument(x, memory_under_views(x))
    if own_layout and not writes:
        return
    with DisableTorchFunctionSubclass():
        shape, strides, start = tuple(x.shape), x.stride(), x.storage_offset()
    begin = 0 if offset is None else offset - start
    of_one = strides_alone(x)
    view = [begin + distance for distance in _distances(size, stride)]
    elements = _element_indices(view, shape, strides)
    if elements is not None:
        outside = max(view) > max(_distances(shape, of_one))
        if own_layout or outside or elements == _element_indices(view, shape, of_one):
            return
    raise RuntimeError(
        f"{x.dispatch_level.name}: as_strided(size={list(size)}, stride={list(stride)}, "
        f"storage_offset={offset}) of a result of shape {tuple(shape)}: expected a tensor whose "
        f"examples lie apart in memory, got one with elements of other examples in between, so "
        f"that the strides of one example are {list(strides)} in the batch and {of_one} alone. "
        f"Call .contiguous() first, or use other views (slices, unfold, diagonal) instead."
    )


def _distances(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the distances in memory of a tensor's elements from the first one."""
    distances = [0]
    for size, stride in zip(shape, strides, strict=True):
        distances = [d + i * stride for d in distances for i in range(size)]
    return distances


def _element_indices(
    view: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> list[int] | None:
    """Return the indices of the elements at distances in memory; None if one is not there."""
    at = {distance: i for i, distance in enumerate(_distances(shape, strides))}
    return [at[distance] for distance in view] if at.keys() >= set(view) else None


function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD, _as_strided, torch.as_strided, Tensor.as_strided, torch.as_strided_copy, view=True
)
function_rules.add(Stage.METHOD, _as_strided_in_place, torch.as_strided_, Tensor.as_strided_)
function_rules.add(Stage.METHOD, _scatter, torch.as_strided_scatter, Tensor.as_strided_scatter)
