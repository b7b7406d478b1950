"""The tensors of the whole batch in a body that runs on a subset: remapped arguments, and writes.

NOTE [writes in subsets]
The part of a tensor that a body sees is a copy. If the body writes into it, directly or by a view,
the tensor gets the new values when the body ends: the part's count of writes tells. Two tensors of
the whole batch that share memory have parts that do not, so a body that uses both may not write
into either. A tensor that all examples share has no parts. A write into it is refused if the
function of the vmap has made it, since each example would have one of its own. A tensor from
outside of the function is one for all.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping, Sequence
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch._C import DisableTorchFunction

from tsfunc.bridge.batch.selections import Selection
from tsfunc.bridge.control.node_writes import count_writes, memory_key, physical_tensor
from tsfunc.bridge.trace.trace_level import TraceTracer
from tsfunc.bridge.tracers.attributes import OF_TYPES
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.bridge.writing.promotion import CreatedOutside, aliases_of
from tsfunc.dispatch.state import Level, tls


def is_remapped(func: Any) -> bool:
    """True if a call made while a body runs belongs to the body and has arguments to remap.

    The arguments of a kernel's call are remapped already. A query of a tensor's type has the same
    answer inside and outside, and the code that runs a nested body makes such queries too.
    """
    if tls.state.running is not None or func == _REQUIRES_GRAD:
        return False
    return METHODS.get(func) not in OF_TYPES


_REQUIRES_GRAD: Final = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, complex, type(None)})


class ArgRemapper:
    """Remaps the arguments of each call of a body that runs on a subset.

    A tensor that the body closes over or gets as an operand is remapped once: NOTE [writes in
    subsets].

    Args:
        outside: the remapper of the code that runs the body, if that is a body itself.
    """

    __slots__ = ("label", "outside", "subset", "taken")

    def __init__(self, subset: BatchLevel, label: str, outside: ArgRemapper | None) -> None:
        self.subset, self.label, self.outside = subset, label, outside
        # By the id of a tensor: the tensor, its part, the writes into the part's memory, and the
        # tensor as the code outside of the body sees it.
        self.taken: dict[int, tuple[Tracer, Any, int, Any]] = {}

    def fresh(self) -> ArgRemapper:
        outside = None if self.outside is None else self.outside.fresh()
        return ArgRemapper(self.subset, self.label, outside)

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        subset = self.subset
        known = self.taken
        remapped: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN or (kind is SlottedBatchTracer and arg.dispatch_level is subset):
                remapped.append(arg)
            elif id(arg) in known:
                remapped.append(known[id(arg)][1])
            else:
                break
        else:
            if not kwargs:
                if all(map(is_, remapped, args)) or not is_remapped(func):
                    return None
                return remapped, kwargs
        if not is_remapped(func):
            return None
        taken = [self.remapped(arg) for arg in args]
        named = {name: self.remapped(arg) for name, arg in kwargs.items()} if kwargs else kwargs
        same = all(map(is_, taken, args)) and all(named[name] is kwargs[name] for name in kwargs)
        return None if same else (taken, named)

    def remapped(self, value: Any) -> Any:
        """Return an argument with the parts of its tensors in their place."""
        if type(value) is Selection:
            return value.remapped(self.remapped)
        if isinstance(value, Tracer):
            if value.dispatch_level is self.subset:
                return value
            entry = self.taken.get(id(value))
            if entry is not None:
                return entry[1]
            whole = value if self.outside is None else self.outside.known(value)
            entry = self.taken.get(id(whole))
            part = as_seen_by_current_level(whole) if entry is None else entry[1]
            if part is not value:
                count = write_count(part) if entry is None else entry[2]
                self.taken[id(value)] = value, part, count, whole
                self.taken.setdefault(id(whole), (whole, part, count, whole))
            return part
        if type(value) in (list, tuple):
            items = [self.remapped(item) for item in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        return value

    def known(self, value: Any) -> Any:
        """Return a tensor as the body, or code around it, sees it if one of them has used it."""
        entry = self.taken.get(id(value))
        if entry is not None:
            return entry[1]
        return value if self.outside is None else self.outside.known(value)

    def written(self) -> list[tuple[Any, Any]]:
        """Return the tensors whose parts were written into, as seen outside, with these.

        Raises:
            RuntimeError: another tensor that the body uses has the memory of one of them, or all
                examples have it.
        """
        wholes = {id(whole): whole for _, _, _, whole in self.taken.values()}
        changed = {
            id(whole): (whole, part)
            for _, part, count, whole in self.taken.values()
            if write_count(part) != count
        }
        for whole, part in changed.values():
            memory = memory_key(whole)
            if memory_key(part) == memory:
                raise RuntimeError(self.refused(whole))
            if any(x is not whole and memory_key(x) == memory for x in wholes.values()):
                raise RuntimeError(self.refused(whole, "the body uses by another view, too"))
        return [*changed.values()]

    def refused(self, value: torch.Tensor, why: str = "all examples share") -> str:
        """Return the message for a write that only some examples are to see."""
        return refused_write(self.label, tuple(value.shape), self.subset.root, why)


def write_count(value: Any) -> int:
    """Return the number of writes into a tensor's memory; 0 if torch does not count them."""
    inner = physical_tensor(value)
    if isinstance(inner, TraceTracer):
        return count_writes(inner.node)
    with DisableTorchFunction():
        return 0 if inner.is_inference() else int(inner._version)


def shared_by_examples(
    roots: Sequence[Any], *, tracers: bool = False
) -> list[tuple[torch.Tensor, int]]:
    """Return the plain tensors that functions hold, and the numbers of writes into them.

    Globals are not searched: they are not made by the function of the vmap.

    Args:
        tracers: True to return tracers, too.
    """
    tensors: dict[int, torch.Tensor] = {}
    met: set[int] = set()
    stack = list(roots)
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind in PLAIN_TENSORS or (tracers and isinstance(value, Tracer)):
            tensors[id(value)] = value
        elif kind in _HOLDERS and id(value) not in met:
            met.add(id(value))
            if kind is FunctionType:
                stack += value.__closure__ or ()
                stack += value.__defaults__ or ()
            else:
                stack += gc.get_referents(value)
    return [(tensor, write_count(tensor)) for tensor in tensors.values()]


_HOLDERS: Final = frozenset({
    FunctionType, MethodType, CellType, functools.partial, list, tuple, dict,
})  # fmt: skip


def is_made_inside(tensor: torch.Tensor, level: BatchLevel) -> bool:
    """True if the function of a level has made a tensor."""
    try:
        aliases_of(tensor, level)
    except CreatedOutside:
        return False
    return True


def refuse_writes_of_all(
    label: str, before: Sequence[tuple[torch.Tensor, int]], level: BatchLevel
) -> None:
    """Raise if branches that all examples have run have written into tensors from outside of them.

    Args:
        before: the tensors, and the numbers of writes before the branches ran.

    Raises:
        RuntimeError: a branch has written into a tensor of the function of the vmap.
    """
    for tensor, count in before:
        if write_count(tensor) == count:
            continue
        if isinstance(tensor, Tracer) or is_made_inside(tensor, level.root):
            raise RuntimeError(
                f"{label}: a branch writes in place into a tensor of shape {tuple(tensor.shape)} "
                f"from outside of it, and all examples of {level.name} run every branch: because "
                f"of batching='select', or because a branch exchanges values with other examples. "
                f"Write into a clone, and return that."
            )


def refused_write(label: str, shape: tuple[Any, ...], level: Level, why: str) -> str:
    """Return the message for a write that only some examples are to see."""
    return (
        f"{label}: the body writes in place into a tensor of shape {shape} that {why}, and only "
        f"some of the examples of {level.name} run it. Write into a clone, and return that."
    )
