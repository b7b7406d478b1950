"""Promotes a user's tensor, with all its aliases, to tracers of a level.

NOTE [promotion of tensors]
Plain tensors inside a transformed function are torch's own, as are the results of plain torch
calls there. If the function writes values of the level into such a tensor (``out = torch.zeros(3);
out[0] = x``), the tensor must become a tracer of the level. The Python object itself must change,
because the function's variables, lists and modules hold it: ``_swap_tensor_impl`` gives a Python
object another tensor, and the object gets another class.

The tensors that share its memory, its aliases, must follow. The aliases are complete if each
reference to the storage is accounted for: the storage counts its plain tensors, and each tensor
that is not older than the level is examined. If the memory is reached from outside (NOTE [tensors
from outside] in ``outside``), other code may read it, and the write is refused. A reference that no
Python object explains belongs to an autograd graph, which keeps its saved values.

The aliases become one tensor of the level, the base, and its views: ``_covering_tensor`` returns
the tensor that covers all of the shared memory, and ``as_strided`` takes the others from it. If the
written values are not batched, the base is not copied but only wrapped, so that autograd can record
at the level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunction, _storage_Use_Count, _swap_tensor_impl

from tsfunc.bridge.sizes.strides import hint_of
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.nesting import is_differentiated, tensors_inside
from tsfunc.bridge.tracers.reachable import ModuleEntry, gradient_of
from tsfunc.bridge.tracers.torch_state import without_factory_keys
from tsfunc.bridge.tracers.tracer import SlottedTracer, Tracer, TracerLevel, attributes_of
from tsfunc.bridge.writing.outside import OutsideTensors, live_tensors, recent_tensors
from tsfunc.bridge.writing.storages import memory_of, tensor_with_memory
from tsfunc.bridge.writing.tracer_hooks import TracerHook, attach_hook, detach_hook, hook_of
from tsfunc.ops.dims import memory_span

Tensors = Sequence[torch.Tensor]


class CreatedOutside(Exception):
    """The tensor is from outside of the function, or one that shares its memory is."""


class NoCommonBase(Exception):
    """No single tensor covers the memory that the tensors share."""


def _physical_value(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor_with_memory(tensor)
    assert plain is not None
    return plain


@dataclass
class TensorAliases:
    """The tensors through which a write to a tensor is visible.

    Attributes:
        tensors: the tensor and those that share its memory, plain or tracers of one outer level.
        lifted: tracers of the level itself that wrap one of the tensors.
        entries: the parameters and buffers of modules from outside that have the memory.
        hooks: the hooks of emulated views of the tensors.
        fixed: True if forward mode runs at the level, or at one further in that has tracers of the
            tensors: it views their bases and tangents again, by their strides and offsets.
    """

    tensors: list[torch.Tensor]
    lifted: list[Any]
    entries: list[ModuleEntry]
    hooks: list[TracerHook]
    fixed: bool


def aliases_of(subject: torch.Tensor, level: TracerLevel) -> TensorAliases:
    """Return the tensors that must become tracers of the level together with the subject.

    Raises:
        CreatedOutside: one of them is known outside of the level.
    """
    plain = tensor_with_memory(subject)
    memory = None if plain is None else memory_of(plain)
    if plain is None or memory is None:
        raise CreatedOutside
    recent, relatives, entries = relatives_of(plain, memory, level)
    depth = subject.dispatch_level.depth if isinstance(subject, Tracer) else 0
    ids = {id(tensor) for tensor in relatives}
    aliases = TensorAliases([] if depth else relatives, [], entries, [], level.forward > 0)
    others: list[Tracer] = []
    for tensor in recent.values():
        if not isinstance(tensor, Tracer) or id(tensor_with_memory(tensor)) not in ids:
            continue
        other = tensor.dispatch_level
        aliases.fixed |= other.alive and other.depth >= level.depth and other.forward > 0
        if other is level:
            aliases.lifted.append(tensor)
        elif other.depth == depth:
            aliases.tensors.append(tensor)
        elif other.alive and depth < other.depth < level.depth:
            others.append(tensor)
    wrapped = {id(value) for tensor in aliases.tensors for value in tensors_inside(tensor)}
    if any(id(tensor) not in wrapped for tensor in others):
        raise CreatedOutside  # a transform between the two levels depends on the tensor
    outside = any(isinstance(t, Tracer) and t.is_from_outside() for t in aliases.tensors)
    if outside or id(subject) not in recent:
        raise CreatedOutside
    aliases.tensors = _overlapping(subject, aliases.tensors)
    if aliases.fixed:
        aliases.tensors += _unheld_bases(aliases.tensors)
    promoted = {id(tensor) for tensor in aliases.tensors}
    hooks = {id(hook): hook for hook in map(hook_of, recent.values())}.values()
    aliases.hooks = [x for x in hooks if isinstance(x, TracerHook) and id(x.base) in promoted]
    return aliases


def _unheld_bases(tensors: Tensors) -> list[torch.Tensor]:
    """Return the tensors of a trace that others are views of, and that no object stands for.

    Autograd views the gradient or the tangent of a base again by the offset of each view, which
    counts from the start of the base.
    """
    bases = [(id(base_of(x)), x.base_here()) for x in tensors if isinstance(x, Tracer)]
    identities_with_objects = {identity for identity, base in bases if base is None}
    return [
        base
        for identity, base in dict(bases).items()
        if base is not None and identity not in identities_with_objects
    ]


def _overlapping(subject: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    """Return the tensors that overlap the subject, directly or through other tensors."""
    rest = [(tensor, _Extent(tensor)) for tensor in tensors if tensor is not subject]
    near_tensors, news = [subject], [_Extent(subject)]
    while news and rest:
        position = news.pop()
        near = [position.overlaps(other) for _, other in rest]
        near_tensors += [tensor for (tensor, _), is_near in zip(rest, near, strict=True) if is_near]
        news += [other for (_, other), is_near in zip(rest, near, strict=True) if is_near]
        rest = [pair for pair, is_near in zip(rest, near, strict=True) if not is_near]
    return near_tensors


def relatives_of(
    plain: torch.Tensor, memory: int, level: TracerLevel
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor], list[ModuleEntry]]:
    """Return the live tensors that may be made inside the level, by id, and those with a memory.

    The third result are the entries of modules from outside with the memory.

    Args:
        level: the level whose function must have made all tensors of the memory.

    Raises:
        CreatedOutside: a tensor with this memory may be known outside of the level.
    """
    bases = {id(plain._base)}  # reading _base makes a Python object for a base that had none
    while True:
        recent = recent_tensors()
        relatives = [t for t in recent.values() if memory_of(t) == memory]
        earlier_bases, bases = bases, {id(t._base) for t in relatives if t._base is not None}
        if bases <= earlier_bases:
            break
    with DisableTorchFunction():
        storage = plain.untyped_storage()
    # Memory that can't grow belongs to NumPy or to another library.
    if not {id(plain), *bases} <= recent.keys() or not storage.resizable():
        raise CreatedOutside
    outside = OutsideTensors(level)
    if plain in outside:
        raise CreatedOutside
    unknown = _storage_Use_Count(memory) - 1 - len(relatives)
    if (unknown or any(_held_in_torch(t, relatives) for t in relatives)) and _is_older(
        memory, recent
    ):
        raise CreatedOutside
    return recent, relatives, outside.entries_of(memory)


def _held_in_torch(tensor: torch.Tensor, relatives: Tensors) -> bool:
    """True if C++ refers to a tensor other than by the Python object and the tensor's views."""
    views = sum(1 for other in relatives if other._base is tensor)
    use_count: int = tensor._use_count()  # type: ignore[attr-defined]
    return use_count - 1 - views > 0


def _is_older(memory: int, recent: Mapping[int, torch.Tensor]) -> bool:
    """True if a tensor older than the level has this memory, itself or as its gradient."""
    for item in live_tensors():
        if isinstance(item, Tracer):
            continue
        if id(item) not in recent and memory_of(item) == memory:
            return True
        gradient = gradient_of(item)
        if gradient is not None and memory_of(gradient) == memory:
            return True
    return False


class _Extent:
    """The position of a tensor in its storage, in elements, and its reading of the memory."""

    __slots__ = ("conj", "dtype", "negative", "offset", "size", "stride", "tracked")

    def __init__(self, tensor: torch.Tensor) -> None:
        plain = _physical_value(tensor)
        self.offset: Any = plain.storage_offset()
        self.size: Any = tensor.size()
        self.stride: Any = tensor.stride()
        self.dtype = tensor.dtype
        self.conj, self.negative = plain.is_conj(), plain.is_neg()
        self.tracked = is_differentiated(tensor)

    @property
    def span(self) -> Any:
        """The number of elements from the first to the last that the tensor reaches."""
        return memory_span(self.size, self.stride)

    def bounds(self) -> tuple[int, int]:
        """Return the first byte that the tensor reaches, and the end."""
        width = self.dtype.itemsize
        return hint_of(self.offset) * width, hint_of(self.offset + self.span) * width

    def has(self, other: _Extent) -> bool:
        """True if all memory of the other tensor belongs to this tensor too."""
        first, end = self.bounds()
        inner_first, inner_end = other.bounds()
        if not (first <= inner_first and inner_end <= end):
            return False
        if self.full:
            return True
        with DisableTorchFunction():  # a trace would record the masks
            return bool(torch.all(self._bytes(first, end) | ~other._bytes(first, end)))

    def overlaps(self, other: _Extent) -> bool:
        """True if both have some memory in common."""
        (first, end), (other_first, other_end) = self.bounds(), other.bounds()
        first, end = min(first, other_first), max(end, other_end)
        if end - first >= sum(b - a for a, b in (self.bounds(), other.bounds())):
            return False
        if self.full and other.full:
            return True
        with DisableTorchFunction():
            return bool(torch.any(self._bytes(first, end) & other._bytes(first, end)))

    @property
    def full(self) -> bool:
        """True if the tensor has every element of its span."""
        return hint_of(self.span) == math.prod(map(hint_of, self.size))

    def _bytes(self, first: int, end: int) -> torch.Tensor:
        """Return a boolean mask of the bytes of a range that belong to the tensor."""
        width = self.dtype.itemsize
        with without_factory_keys():
            covered = torch.zeros(end - first, dtype=torch.bool)
            size = [*map(hint_of, self.size), width]
            stride = [hint_of(step) * width for step in self.stride]
            covered.as_strided(size, [*stride, 1], hint_of(self.offset) * width - first).fill_(True)
        return covered


Replaced = list[tuple[torch.Tensor, type, torch.Tensor]]
"""Promoted tensors, each with its previous class and an object with its previous tensor."""


def promote(aliases: TensorAliases, level: TracerLevel, *, batched: bool) -> Replaced:
    """Make each of the aliases a tracer of the level, in place.

    Args:
        level: the level that the tensors become tracers of.
        batched: True if each example gets its own copy.

    Raises:
        NoCommonBase: the tensors overlap, and none of them covers the memory of all.
    """
    # The tensors date from before the write: record the copies even if the write is under no_grad.
    inference = all(_physical_value(tensor).is_inference() for tensor in aliases.tensors)
    # An emulated view of a tensor that was transposed in place knows the previous strides.
    movable = all(hook.stride == hook.base.stride() for hook in aliases.hooks)
    movable = movable and not aliases.fixed
    with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
        pairs = list(_counterparts(aliases.tensors, level, batched, movable))
    promoted = {id(tensor): tensor for tensor, _ in pairs}
    replaced: Replaced = []
    for tensor, tracer in pairs:
        kind = type(tensor)
        replaced.append((tensor, kind, swap_identity(tensor, tracer)))
    for lifted in aliases.lifted:
        now: Any = promoted.get(id(lifted.value))
        if now is not None:
            lifted.value = now.value
            if isinstance(lifted, BatchTracer):
                lifted.bdim = now.bdim
    for hook in aliases.hooks if movable else ():
        hook.stride = hook.base.stride()
    return replaced


def demote(replaced: Replaced) -> None:
    """Give promoted tensors their previous tensors and classes."""
    for tensor, kind, was in replaced:
        changed: Any = tensor
        detach_hook(changed)
        attributes = attributes_of(was) if isinstance(was, Tracer) else {}
        names = attributes_of(changed)
        _set_aside(changed)
        _swap_tensor_impl(changed, was)
        changed.__class__ = kind
        for name in names.keys() - attributes.keys():
            delattr(changed, name)
        for name, value in attributes.items():
            setattr(changed, name, value)


def _counterparts(
    tensors: Tensors, level: TracerLevel, batched: bool, movable: bool
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield each tensor with its new tracer: the base, tensors unlinked from it, and views."""
    positions = {id(tensor): _Extent(tensor) for tensor in tensors}
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(id(base_of(tensor)), []).append(tensor)
    firsts = [_first(group, positions) for group in groups.values()]
    if batched:
        base, position = _covering_tensor(firsts, positions)
        if movable:
            _close_gaps(position, list(positions.values()))
        copies = _copies(base, position, level)
    for first, group in zip(firsts, groups.values(), strict=True):
        at = positions[id(first)]
        if not batched:
            lifted = level.lift(first)
        elif first is base:
            lifted = copies
        else:
            lifted = _unlinked_tracer(copies, first, at, position)
        yield first, lifted
        for tensor in group:
            if tensor is not first:
                yield tensor, _view(lifted, positions[id(tensor)], at)


def base_of(tensor: torch.Tensor) -> Any:
    """Return an object that identifies the tensor that a tensor is a view of, or itself."""
    while isinstance(tensor, Tracer):
        origin = tensor.base_identity()
        if origin is not None:
            return origin
        tensor = tensor.value  # type: ignore[attr-defined]
    return tensor if tensor._base is None else tensor._base


def _first(tensors: Tensors, positions: Mapping[int, _Extent]) -> torch.Tensor:
    """Return the tensor that covers the memory of all, preferably not a view."""
    if len(tensors) == 1:
        return tensors[0]
    for tensor in sorted(tensors, key=_is_view):
        if all(positions[id(tensor)].has(positions[id(other)]) for other in tensors):
            return tensor
    raise NoCommonBase


def _is_view(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, Tracer) and tensor.base_here() is not None:
        return True
    return _physical_value(tensor)._base is not None


def _covering_tensor(
    firsts: Tensors, positions: Mapping[int, _Extent]
) -> tuple[torch.Tensor, _Extent]:
    """Return the tensor that covers the memory of all; for plain tensors, else the storage."""
    try:
        base = _first(firsts, positions)
        return base, positions[id(base)]
    except NoCommonBase:
        if any(isinstance(t, Tracer) or t.requires_grad for t in firsts):
            raise
        with without_factory_keys():
            whole = torch.empty(0, dtype=firsts[0].dtype, device=firsts[0].device)
        whole.set_(firsts[0].untyped_storage())
        return whole, _Extent(whole)


def _close_gaps(base: _Extent, extents: Sequence[_Extent]) -> None:
    """Move tensors to their places in a base without gaps, if steps along its dims reach them.

    An example of a tensor of an outer vmap has gaps if its batch dim is not the first. In a
    program, compilers lose gaps when they replace a write by its result.
    """
    extents = [base, *(extent for extent in extents if extent is not base)]
    if base.full or any(extent.dtype is not base.dtype for extent in extents):
        return
    steps: list[tuple[Any, Any]] = []  # the stride of each dim, with gaps and without
    dense: Any = 1
    for size, stride in sorted(
        zip(base.size, base.stride, strict=True), key=lambda dim: hint_of(dim[1])
    ):
        if hint_of(size) != 1:
            steps.insert(0, (stride, dense))
            dense = dense * size

    def moved(distance: Any) -> Any:
        place: Any = 0
        for stride, step in steps:
            count = distance // stride if hint_of(stride) else 0
            place, distance = place + count * step, distance - count * stride
        return None if hint_of(distance) else place

    start, places = base.offset, []
    for extent in extents:
        pairs = zip(extent.size, extent.stride, strict=True)
        strides = [moved(stride) if hint_of(size) > 1 else stride for size, stride in pairs]
        places.append((moved(extent.offset - start), strides))
    if any(offset is None or None in strides for offset, strides in places):
        return
    for extent, (offset, strides) in zip(extents, places, strict=True):
        extent.offset, extent.stride = offset, tuple(strides)


def _copies(base: torch.Tensor, position: _Extent, level: TracerLevel) -> Any:
    """Return one copy of the base per example, each with the layout of the base."""
    assert isinstance(level, BatchLevel)
    size = (level.batch_size, *position.size)
    copies = base.new_empty_strided(size, (position.span, *position.stride))
    copies.copy_(base)
    return wrap(copies, 0, level)


def _unlinked_tracer(copies: Any, tensor: torch.Tensor, at: _Extent, base: _Extent) -> Any:
    """Return a tracer of the base's memory that is not a view of it, as after ``detach``."""
    # Detached last: autograd would take a view of a detached tensor for a leaf after a write to it.
    alias = _view(copies, at, base).detached_here()
    if at.tracked:
        alias.value.copy_(tensor)  # the same numbers, with an autograd graph of their own
    return alias


def _view(tracer: Any, at: _Extent, base: _Extent) -> Any:
    """Return the view of a base's tracer whose position in the base is ``at``."""
    start = tracer.storage_offset()
    if at.dtype is not base.dtype:
        tracer = _read_as(tracer.as_strided((base.span,), (1,), start), at.dtype)
        start = start * base.dtype.itemsize // at.dtype.itemsize
    begin = base.offset * base.dtype.itemsize // at.dtype.itemsize
    view = tracer.as_strided(at.size, at.stride, start + at.offset - begin)
    if at.conj is not base.conj:
        view = view.conj()
    return torch._neg_view(view) if at.negative is not base.negative else view


def _read_as(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret memory as elements of another dtype.

    A complex tensor read as real gives its real and imaginary parts.
    """
    if flat.is_complex() and dtype.to_complex() is flat.dtype and not dtype.is_complex:
        return torch.view_as_real(flat).flatten()
    if dtype.is_complex and flat.dtype.is_floating_point and flat.dtype.to_complex() is dtype:
        return torch.view_as_complex(flat.unflatten(0, (-1, 2)))
    return flat.view(dtype)


def swap_identity(tensor: Any, tracer: Any) -> Any:
    """Give the object the tracer's tensor and class; return a new object with its old tensor."""
    hook = detach_hook(tensor)
    was = _set_aside(tensor)
    attributes = attributes_of(tracer)  # a compiled tracer may have its value in its tensor
    _swap_tensor_impl(tensor, tracer)
    if isinstance(tensor, torch.nn.Parameter):
        tensor._is_param = True  # modules recognize a parameter by this attribute
    as_tensor, as_slotted = tracer.layouts or (type(tracer), type(tracer))
    tensor.__class__ = as_slotted if isinstance(tensor, SlottedTracer) else as_tensor
    for name, value in attributes.items():
        setattr(tensor, name, was if value is tensor else value)
    if hook is not None:
        attach_hook(tensor, hook)
    return was


def _set_aside(tensor: Any) -> Any:
    """Return a new object with the tensor of the old object, which then holds an empty tensor."""
    was: Any
    if isinstance(tensor, BatchTracer):
        was = tensor.aliased_here()
    else:
        with DisableTorchFunction(), without_factory_keys():
            was = torch.empty(0)
        if isinstance(tensor, Tracer):
            attributes = attributes_of(tensor)
            was.__class__ = type(tensor)
            for name, value in attributes.items():
                setattr(was, name, value)
    _swap_tensor_impl(tensor, was)
    return was
