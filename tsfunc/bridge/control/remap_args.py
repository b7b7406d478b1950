"""The remapping of a body's arguments by the function handler: NOTE [active subsets]."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import torch

from tsfunc.bridge.tracers.attributes import OF_TYPES
from tsfunc.bridge.tracers.fast_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.tracer import Tracer, as_seen_by_current_level
from tsfunc.dispatch.state import Level, tls

if TYPE_CHECKING:
    from tsfunc.bridge.control.subsets import SubsetLevel


def is_remapped(func: Any) -> bool:
    """Return True if a call made while a body runs belongs to the body and has arguments to remap.

    The arguments of a kernel's call are remapped already. A query of a tensor's type has the same
    answer inside and outside, and the code that runs a nested body makes such queries too.
    """
    if tls.state.running is not None or func == _REQUIRES_GRAD:
        return False
    return METHODS.get(func) not in OF_TYPES


_REQUIRES_GRAD: Final = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


_WRITES = frozenset({torch.Tensor.__setitem__})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, complex, type(None)})


class ArgRemapper:
    """Remaps the arguments of each call of a body that runs on a subset.

    A tensor that the body closes over is remapped once. It stays unchanged while the body runs:
    writes into it are refused.
    """

    __slots__ = ("subset", "taken", "what")

    def __init__(self, subset: SubsetLevel, what: str) -> None:
        self.subset, self.what = subset, what
        self.taken: dict[int, tuple[Tracer, Any]] = {}

    def anew(self) -> ArgRemapper:
        return ArgRemapper(self.subset, self.what)

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        subset = self.subset
        known = self.taken
        quick: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN or (kind is SlottedBatchTracer and arg.dispatch_level is subset):
                quick.append(arg)
            elif id(arg) in known:
                quick.append(known[id(arg)][1])
            else:
                break
        else:
            if not kwargs:
                if all(map(is_, quick, args)) or not is_remapped(func):
                    return None
                if quick[0] is args[0] or not _writes(func):
                    return quick, kwargs
        if not is_remapped(func):
            return None
        if args and isinstance(args[0], Tracer) and _writes(func) and subset.replaces(args[0]):
            shape = tuple(args[0].shape)
            raise RuntimeError(refused_write(self.what, func.__name__, shape, subset.whole))
        taken = [self._taken(arg) for arg in args]
        named = {name: self._taken(arg) for name, arg in kwargs.items()} if kwargs else kwargs
        same = all(map(is_, taken, args)) and all(named[name] is kwargs[name] for name in kwargs)
        return None if same else (taken, named)

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tracer):
            if value.dispatch_level is self.subset:
                return value
            known = self.taken.get(id(value))
            if known is None:
                known = value, as_seen_by_current_level(value)
                if known[1] is not value:
                    self.taken[id(value)] = known
            return known[1]
        if type(value) in (list, tuple):
            items = [self._taken(item) for item in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        return value


def refused_write(what: str, by: str, shape: tuple[Any, ...], level: Level) -> str:
    """Return the message for a write into a tensor that a body closes over.

    Args:
        what: the control flow operator.
        by: the name of the function that writes.
        shape: the shape of the tensor.
        level: the vmap.
    """
    return (
        f"{what}: the body writes in place ({by}) into a tensor that it closes over, of shape "
        f"{shape}, which only some of the examples of {level.name} are to see. Pass it in as an "
        f"operand, write into a clone of it, and return that."
    )


@functools.lru_cache(maxsize=1024)
def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        func in _WRITES
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    )
