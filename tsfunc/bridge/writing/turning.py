"""A tensor of the user's becomes a tracer of a level, with all that shares memory with it.

NOTE [writing into what was made inside]
Plain tensors inside of a transformed function are torch's own, and so is what the function makes
of them. When it writes values of the level into such a tensor (``out = torch.zeros(3);
out[0] = x``), the tensor must become one of the level's: the object itself, since the function's
variables, lists and modules hold it. ``_swap_tensor_impl`` gives a Python object another tensor to
stand for, and its class is changed.

What shares memory with it must follow. All its kin are known where each reference to its storage
is accounted for: plain tensors are counted by the storage, and those that Python knows and that
were born inside (NOTE [born inside]) are looked at one by one. If one of them is from outside,
somebody else will read it, and the write is refused. A reference that no Python object explains
belongs to a graph of autograd, which keeps the values that it saved.

The kin become one tensor of the level and its views again: ``_home`` is the one that has all of
the memory that they share, the others are taken from it by ``as_strided``. Where nothing batched
is written, the home is not copied but only wrapped, so that autograd can be recorded at the level.

Private names used here (torch 2.11 to 2.13): ``_C._swap_tensor_impl`` as said above;
``_C._storage_Use_Count`` and ``UntypedStorage._cdata`` say how many tensors have a storage;
``Tensor._use_count`` who refers to a tensor in C++, ``Tensor._base`` what it is a view of;
``DisableTorchFunctionSubclass`` reads a tensor's own attributes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _storage_Use_Count,
    _swap_tensor_impl,
)

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.torch_state import without_factory_keys
from tsfunc.bridge.tracers.tracer import SlottedTracer, Tracer, TracerLevel, attributes_of
from tsfunc.bridge.writing.births import born_inside, take_place
from tsfunc.bridge.writing.marked import mark, unmark

Tensors = Sequence[torch.Tensor]


class BornOutside(Exception):
    """The tensor, or what it shares memory with, is not the transformed function's own."""


class Scattered(Exception):
    """What shares its memory can't be taken from one tensor."""


def physical(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with memory that a tracer stands for in the end; None where that can't be told."""
    while isinstance(tensor, Tracer):
        value = getattr(tensor, "value", None)
        if not isinstance(value, torch.Tensor):
            return None
        tensor = value
    return tensor


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    plain = physical(tensor)
    assert plain is not None
    return plain


def memory_of(tensor: torch.Tensor) -> int | None:
    """What identifies a tensor's storage, None where it has none."""
    if isinstance(tensor, Tracer) or tensor.layout is not torch.strided:
        return None
    try:
        with DisableTorchFunctionSubclass():
            memory: int = tensor.untyped_storage()._cdata
            return memory
    except (RuntimeError, NotImplementedError):
        return None


@dataclass
class Kin:
    """All that a write to a tensor is seen through.

    Attributes:
        tensors: it and what shares memory with it, plain ones or tracers of one outer level.
        lifted: tracers of that level itself that stand for one of them.
    """

    tensors: list[torch.Tensor]
    lifted: list[Any]


def kin_of(subject: torch.Tensor, level: TracerLevel) -> Kin:
    """Who must follow when the tensor becomes one of the level's.

    Raises:
        BornOutside: one of them is known outside of the level.
    """
    plain = physical(subject)
    memory = None if plain is None else memory_of(plain)
    if plain is None or memory is None:
        raise BornOutside
    inside, relatives = relatives_of(plain, memory, level)
    depth = _depth(subject)
    ids = {id(tensor) for tensor in relatives}
    kin = Kin([], []) if depth else Kin(relatives, [])
    others: list[Tracer] = []
    for tensor in inside.values():
        if not isinstance(tensor, Tracer) or id(physical(tensor)) not in ids:
            continue
        other = tensor.dispatch_level
        if other is level:
            kin.lifted.append(tensor)
        elif other.depth == depth:
            kin.tensors.append(tensor)
        elif other.alive and other.depth < level.depth:
            others.append(tensor)
    wrapped = {id(value) for tensor in kin.tensors for value in _values(tensor)}
    if any(id(tensor) not in wrapped for tensor in others):
        raise BornOutside  # a transform between the two stands on it
    outside = any(isinstance(t, Tracer) and t.from_outside() for t in kin.tensors)
    if outside or id(subject) not in inside:
        raise BornOutside
    kin.tensors = _connected(subject, kin.tensors)
    return kin


def _connected(subject: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    """Those that overlap with the subject, or with one that does; others don't see the write."""
    rest = [(tensor, _Place(tensor)) for tensor in tensors if tensor is not subject]
    found, news = [subject], [_Place(subject)]
    while news and rest:
        place = news.pop()
        near = [place.overlaps(other) for _, other in rest]
        found += [tensor for (tensor, _), is_near in zip(rest, near, strict=True) if is_near]
        news += [other for (_, other), is_near in zip(rest, near, strict=True) if is_near]
        rest = [pair for pair, is_near in zip(rest, near, strict=True) if not is_near]
    return found


def _values(tensor: Any) -> Iterator[Any]:
    """What a tensor wraps, and what that wraps."""
    while isinstance(tensor, Tracer):
        tensor = getattr(tensor, "value", None)
        yield tensor


def _depth(tensor: torch.Tensor) -> int:
    return tensor.dispatch_level.depth if isinstance(tensor, Tracer) else 0


def relatives_of(
    plain: torch.Tensor, memory: int, level: TracerLevel
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """All that was born inside of the level, and what of it has the same memory."""
    bases = {id(plain._base)}  # asking makes an object for a base that had none any more
    while True:
        inside = born_inside(level)
        relatives = [t for t in inside.values() if memory_of(t) == memory]
        known, bases = bases, {id(t._base) for t in relatives if t._base is not None}
        if bases <= known:
            break
    storage = plain.untyped_storage()
    # Memory that can't grow is NumPy's, or somebody else's.
    if not {id(plain), *bases} <= inside.keys() or not storage.resizable():
        raise BornOutside
    unknown = _storage_Use_Count(memory) - 1 - len(relatives)
    if (unknown or any(_held_in_torch(t, relatives) for t in relatives)) and _known_outside(
        memory, inside
    ):
        raise BornOutside
    return inside, relatives


def _held_in_torch(tensor: torch.Tensor, relatives: Tensors) -> bool:
    """Whether C++ refers to a tensor, beside its own object and the views of it."""
    views = sum(1 for other in relatives if other._base is tensor)
    held: int = tensor._use_count()  # type: ignore[attr-defined]
    return held - 1 - views > 0


def _known_outside(memory: int, inside: Mapping[int, torch.Tensor]) -> bool:
    """Whether a tensor that was not born inside has this memory, or has its gradient there."""
    plain: dict[type, bool] = {}
    for item in gc.get_objects():
        kind = type(item)
        wanted = plain.get(kind)
        if wanted is None:
            wanted = plain[kind] = issubclass(kind, torch.Tensor) and not issubclass(kind, Tracer)
        if not wanted:
            continue
        if id(item) not in inside and memory_of(item) == memory:
            return True
        with DisableTorchFunctionSubclass():
            gradient = item.grad if item.is_leaf else None
        if gradient is not None and memory_of(gradient) == memory:
            return True
    return False


class _Place:
    """Where a tensor lies in its storage, in elements, and how it reads what is there."""

    __slots__ = ("conj", "dtype", "negative", "offset", "size", "stride", "tracked")

    def __init__(self, tensor: torch.Tensor) -> None:
        plain = _physical(tensor)
        self.offset: Any = plain.storage_offset()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype = tensor.dtype
        self.conj, self.negative = plain.is_conj(), plain.is_neg()
        self.tracked = plain.requires_grad

    @property
    def span(self) -> Any:
        """How many elements it reaches over."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))

    def bounds(self) -> tuple[int, int]:
        """The first byte that it reaches, and the end."""
        width = self.dtype.itemsize
        return _hint(self.offset) * width, _hint(self.offset + self.span) * width

    def has(self, other: _Place) -> bool:
        """Whether all of the other's memory is this one's too."""
        first, end = self.bounds()
        inner_first, inner_end = other.bounds()
        if not (first <= inner_first and inner_end <= end):
            return False
        return self.full or bool(torch.all(self._bytes(first, end) | ~other._bytes(first, end)))

    def overlaps(self, other: _Place) -> bool:
        """Whether some memory is both's."""
        (first, end), (other_first, other_end) = self.bounds(), other.bounds()
        first, end = min(first, other_first), max(end, other_end)
        if end - first >= sum(b - a for a, b in (self.bounds(), other.bounds())):
            return False
        if self.full and other.full:
            return True
        return bool(torch.any(self._bytes(first, end) & other._bytes(first, end)))

    @property
    def full(self) -> bool:
        """Whether it has all that it reaches over."""
        return _hint(self.span) == math.prod(map(_hint, self.size))

    def _bytes(self, first: int, end: int) -> torch.Tensor:
        """Which bytes of a stretch are its own."""
        width = self.dtype.itemsize
        with without_factory_keys():
            found = torch.zeros(end - first, dtype=torch.bool)
            size = [*map(_hint, self.size), width]
            stride = [_hint(step) * width for step in self.stride]
            found.as_strided(size, [*stride, 1], _hint(self.offset) * width - first).fill_(True)
        return found


def _hint(size: Any) -> int:
    """A size as a number: of one that is symbolic, the one that stands for it while tracing."""
    return size if isinstance(size, int) else size.node.hint


def turn(kin: Kin, level: TracerLevel, *, batched: bool) -> None:
    """Makes tracers of the level of all of them: each object that the user holds is one then.

    Args:
        kin: from :func:`kin_of`.
        level: whose tracers they become.
        batched: whether there is to be a copy for each example.

    Raises:
        Scattered: they overlap, and none of them has all of their memory.
    """
    # What they depend on was recorded before the write, and is to be as they were made.
    inference = all(_physical(tensor).is_inference() for tensor in kin.tensors)
    with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
        pairs = list(_counterparts(kin.tensors, level, batched))
    turned = {id(tensor): tensor for tensor, _ in pairs}
    for tensor, tracer in pairs:
        before = _physical(tensor)
        become(tensor, tracer)
        take_place(before, _physical(tensor), level)
    for lifted in kin.lifted:
        now: Any = turned.get(id(lifted.value))
        if now is not None:
            lifted.value = now.value
            if isinstance(lifted, BatchTracer):
                lifted.bdim = now.bdim


def _counterparts(
    tensors: Tensors, level: TracerLevel, batched: bool
) -> Iterator[tuple[torch.Tensor, Any]]:
    """For each a tracer of the level: the home, what shares its memory, and views of these."""
    places = {id(tensor): _Place(tensor) for tensor in tensors}
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(id(_base(tensor)), []).append(tensor)
    firsts = [_first(group, places) for group in groups.values()]
    if batched:
        home, place = _home(firsts, places)
        copies = _copies(home, place, level)
    for first, group in zip(firsts, groups.values(), strict=True):
        at = places[id(first)]
        if not batched:
            made = level.lift(first)
        elif first is home:
            made = copies
        else:
            made = _unlinked(copies, first, at, place)
        yield first, made
        for tensor in group:
            if tensor is not first:
                yield tensor, _view(made, places[id(tensor)], at)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """The physical tensor that it is a view of, or its own."""
    plain = _physical(tensor)
    return plain if plain._base is None else plain._base


def _first(tensors: Tensors, places: Mapping[int, _Place]) -> torch.Tensor:
    """The one that has all the memory of the others; what is no view itself if it can be."""
    if len(tensors) == 1:
        return tensors[0]
    for tensor in sorted(tensors, key=lambda t: _physical(t)._base is not None):
        if all(places[id(tensor)].has(places[id(other)]) for other in tensors):
            return tensor
    raise Scattered


def _home(firsts: Tensors, places: Mapping[int, _Place]) -> tuple[torch.Tensor, _Place]:
    """The one that has all the memory of the others; else, of plain tensors, the storage."""
    try:
        home = _first(firsts, places)
        return home, places[id(home)]
    except Scattered:
        if any(isinstance(t, Tracer) or t.requires_grad for t in firsts):
            raise
        with without_factory_keys():
            whole = torch.empty(0, dtype=firsts[0].dtype, device=firsts[0].device)
        whole.set_(firsts[0].untyped_storage())
        return whole, _Place(whole)


def _copies(home: torch.Tensor, place: _Place, level: TracerLevel) -> Any:
    """The home once for each example, each laid out as it is."""
    assert isinstance(level, BatchLevel)
    size = (level.batch_size, *place.size)
    copies = home.new_empty_strided(size, (place.span, *place.stride))
    copies.copy_(home)
    return wrap(copies, 0, level)


def _unlinked(copies: Any, tensor: torch.Tensor, at: _Place, home: _Place) -> Any:
    """What shares the home's memory, but is no view of it, as after ``detach``."""
    source = wrap(copies.value.detach(), 0, copies.dispatch_level)
    alias = _view(source, at, home).again()
    if at.tracked:
        alias.value.copy_(tensor)  # the same numbers, with a graph of their own
    return alias


def _view(made: Any, at: _Place, base: _Place) -> Any:
    """The view of a base's tracer that lies in it as ``at`` does in the base."""
    start = made.storage_offset()
    if at.dtype is not base.dtype:
        made = _read_as(made.as_strided((base.span,), (1,), start), at.dtype)
        start = start * base.dtype.itemsize // at.dtype.itemsize
    begin = base.offset * base.dtype.itemsize // at.dtype.itemsize
    view = made.as_strided(at.size, at.stride, start + at.offset - begin)
    if at.conj is not base.conj:
        view = view.conj()
    return torch._neg_view(view) if at.negative is not base.negative else view


def _read_as(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same memory as elements of another type; of complex numbers their parts."""
    if flat.is_complex() and dtype.to_complex() is flat.dtype and not dtype.is_complex:
        return torch.view_as_real(flat).flatten()
    if dtype.is_complex and flat.dtype.is_floating_point and flat.dtype.to_complex() is dtype:
        return torch.view_as_complex(flat.unflatten(0, (-1, 2)))
    return flat.view(dtype)


def become(tensor: Any, tracer: Any) -> None:
    """The object stands for what the tracer stands for; another one for what it was."""
    record = unmark(tensor)
    was = _set_aside(tensor)
    _swap_tensor_impl(tensor, tracer)
    if isinstance(tensor, torch.nn.Parameter):
        tensor._is_param = True  # by which modules know it still
    as_tensor, as_slotted = tracer.forms or (type(tracer), type(tracer))
    tensor.__class__ = as_slotted if isinstance(tensor, SlottedTracer) else as_tensor
    for name, value in attributes_of(tracer).items():
        setattr(tensor, name, was if value is tensor else value)
    if record is not None:
        mark(tensor, record)


def _set_aside(tensor: Any) -> Any:
    """Another object for what it stands for; its own stands for something empty."""
    was: Any
    if isinstance(tensor, BatchTracer):
        was = tensor.again()
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
