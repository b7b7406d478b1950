"""``x.view(...)`` of an operator's result whose batch has another memory layout.

For one example most results are contiguous, and programs take views of them. The batched result
keeps the batch dim where the arguments had it, which may be between dims of the example; the batch
then has no such view. An operator's result at the level that has no other holder is laid out
again, with the batch dim first. A tensor from outside, or a tensor with other views, cannot move,
because its views would lose their memory; the user then gets an emulated view.

``native_group_norm`` takes such a view of its input internally: it gets an input that can be laid
out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass

from tsfunc import pytrees
from tsfunc.bridge.sizes.strides import has_view, hint_of
from tsfunc.bridge.tracers.batch_tracer import BatchTracer, wrap
from tsfunc.bridge.tracers.decompositions import DECOMPOSITIONS
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.bridge.tracers.torch_state import in_backward_formula
from tsfunc.bridge.tracers.tracer import call_torch
from tsfunc.bridge.writing.emulated_views import EmulatedView
from tsfunc.bridge.writing.promotion import CreatedOutside, base_of, relatives_of
from tsfunc.bridge.writing.storages import memory_of, memory_under, tensor_with_memory
from tsfunc.bridge.writing.tracer_hooks import hook_of
from tsfunc.ops.dims import batch_to_front
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.ops.views import known_sizes


class NoView(RuntimeError):
    """The batch has no view where a single example may have one."""


def _view(x: BatchTracer, sizes: Any) -> torch.Tensor:
    """Take a view that the batching rule could not take, after a new layout of the batch."""
    level = x.dispatch_level
    group = _tracers_sharing_memory(x)
    with level.restored():
        x.value.new_empty(x.shape).view(sizes)  # raises if no layout has the view
        if group is None and in_backward_formula():
            # A backward formula reads a saved value, and does not write to it.
            value = batch_to_front(x.value, x.bdim)
            return wrap(value.reshape([value.shape[0], *known_sizes(sizes, value, 0)]), 0, level)
        if group is None:
            raise NoView(
                f"{level.name}: view size is not compatible with input tensor's size and stride "
                f"(at least one dimension spans across two contiguous subspaces). Use "
                f".reshape(...) instead: the batch dim lies between dims that would become one."
            )
        value = batch_to_front(x.value, x.bdim).contiguous()
        for tracer in group:
            tracer.value, tracer.bdim = value.view([value.shape[0], *tracer.shape]), 0
    return torch.ops.aten.view.default(x, sizes)


def _tracers_sharing_memory(x: BatchTracer) -> list[BatchTracer] | None:
    """Return the tracers that share the memory of ``x``; None if it cannot be laid out again.

    An operator at the level must have made the memory. Besides ``x`` the group may contain only
    the base of ``x``, kept alive by C++ or by a hook.
    """
    level, plain = x.dispatch_level, tensor_with_memory(x)
    memory = None if plain is None else memory_of(plain)
    if plain is None or memory is None:
        return None
    try:
        recent, *_ = relatives_of(plain, memory, level)
    except CreatedOutside:
        return None
    group = [x]
    with DisableTorchFunctionSubclass():
        base = x._base
    hook = hook_of(x)
    kept_alive = (base, hook.whole if hook is not None else None)
    for other in recent.values():
        # Tracers of other levels wrap x, or x wraps them.
        if not isinstance(other, BatchTracer) or other.dispatch_level is not level or other is x:
            continue
        if memory_under(other) == memory:
            if not any(other is one for one in kept_alive) or not _same_order(x, other):
                return None
            group.append(other)
    return group


def _same_order(x: BatchTracer, base: BatchTracer) -> bool:
    """True if an example of ``x`` is a reshaped example of the base."""
    if base.bdim is None:
        return False
    return x.numel() == base.numel() and torch.equal(_offsets(x), _offsets(base))


def _offsets(x: BatchTracer) -> torch.Tensor:
    """Return the memory offsets of the first example's elements, as a 1-dim tensor."""
    with DisableTorchFunctionSubclass():
        shape, strides, start = tuple(x.shape), x.stride(), x.storage_offset()
    offsets = torch.tensor(start)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.reshape(-1)


def _view_as_complex(x: BatchTracer) -> torch.Tensor:
    """Raise NoView: the last dim has no stride 1, perhaps because of the batch dim."""
    torch.view_as_complex(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # may raise
    raise NoView("Tensor must have a last dimension with stride 1")


def _emulate_view(base: torch.Tensor, out: torch.Tensor, take: _Map, untake: _Map) -> torch.Tensor:
    """Return an emulated view that is a reshape or a reinterpretation of its base.

    Args:
        out: a copy of its elements in the shape of the view.
        take: makes such a copy.
        untake: maps such a copy to the shape of the tensor.
    """
    return EmulatedView(base, out, take, lambda base, whole: base.copy_(untake(whole))).view()


def _view_rule(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the requested view, or an emulated view if only a single example has the view."""
    try:
        return call_torch(func, types, args, kwargs)
    except NoView:
        base, *rest = args
        strides = strides_alone(base)
        dense = torch.empty_strided(base.shape, strides, dtype=base.dtype, device="meta")
        try:
            shape = func(dense, *rest, **kwargs).shape
        except RuntimeError:
            shape = None
        if shape is None:
            raise
    pair = _COMPLEX if func is torch.view_as_complex else (_reshape(shape), _reshape(base.shape))
    return _emulate_view(base, pair[0](base), *pair)


def strides_alone(x: torch.Tensor) -> list[int]:
    """Return the strides of one example laid out without the batch dims."""
    if not isinstance(x, BatchTracer):
        return list(x.stride())
    strides, bdim = strides_alone(x.value), x.bdim
    if bdim is None:
        return strides
    size, step = x.value.shape[bdim], hint_of(strides.pop(bdim))
    return [stride // size if hint_of(stride) > step else stride for stride in strides]


_Map = Callable[[torch.Tensor], torch.Tensor]
_COMPLEX: tuple[_Map, _Map] = lambda x: torch.complex(*x.unbind(-1)), torch.view_as_real


def _reshape(shape: torch.Size) -> _Map:
    """Return the reshape as an operator, of which ``_reshape_rule`` makes no emulated view."""
    return lambda x: torch.ops.aten.reshape.default(x, shape)


def _reshape_rule(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reshape; return an emulated view if one example has a view where the batch has a copy.

    The function's own results have the layout of one example. Views of its
    arguments keep the arguments' strides, and torch copies these, too.
    """
    base = args[0] if args else None
    if not isinstance(base, BatchTracer) or not any(
        tracer.bdim for tracer in nested_tracers(base, BatchTracer)
    ):  # the batch dims are in front of the dims of an example
        return NotImplemented
    out: torch.Tensor = call_torch(func, types, args, kwargs)
    if in_backward_formula():
        return out
    memory = memory_under_views(base)
    if memory == memory_under_views(out) or is_argument(base, memory):
        return out
    with DisableTorchFunctionSubclass():
        sizes = [[*map(hint_of, each)] for each in (base.shape, strides_alone(base), out.shape)]
    if 0 in sizes[0] or not has_view(*sizes):
        return out
    return _emulate_view(base, out, _reshape(out.shape), _reshape(base.shape))


def memory_under_views(x: torch.Tensor) -> Any:
    """Return an identifier of a tensor's memory; in a trace, of the tensor that it is a view of."""
    plain = tensor_with_memory(x)
    return id(base_of(x)) if plain is None else memory_of(plain)


def is_argument(x: Any, memory: Any) -> bool:
    """True if the memory is that of an argument of one of the tensor's levels."""
    return any(
        isinstance(value, torch.Tensor) and memory_under_views(value) == memory
        for tracer in nested_tracers(x, BatchTracer)
        for value in pytrees.leaves_of(tracer.dispatch_level.outside_roots[1:])
    )


def _native_group_norm(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Clone the input if there are tangents: the forward formula views input and tangent."""
    x = args[0] if args else None
    if not isinstance(x, BatchTracer) or not x.dispatch_level.forward:
        return NotImplemented
    return call_torch(func, types, (x.clone(), *args[1:]), kwargs)


def _is_in_front(kinds: Sequence[Any]) -> bool:
    """True for a batch dim in front of the example's dims, and other arguments that are ints.

    The batch then has a view of some sizes if one example has it.
    """
    return kinds[0] == 0 and all(kind in _SIZES for kind in kinds[1:])


_SIZES: Final = frozenset({int, list, tuple, torch.Size})

function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD, _view_rule, torch.Tensor.view, torch.view_as_complex, view=True,
    left_to_torch=_is_in_front,
)  # fmt: skip
function_rules.add(Stage.METHOD, _view_rule, torch.Tensor.view_as, view=True)
function_rules.add(
    Stage.METHOD, _reshape_rule, torch.reshape, torch.Tensor.reshape, torch.Tensor.reshape_as,
    torch.flatten, torch.Tensor.flatten, torch.ravel, torch.Tensor.ravel, view=True,
    left_to_torch=_is_in_front,
)  # fmt: skip
function_rules.add(Stage.METHOD, _native_group_norm, torch.native_group_norm)
DECOMPOSITIONS["aten::view"] = _view
DECOMPOSITIONS["aten::view_as_complex"] = _view_as_complex
