"""Walks from a tracer to the values inside of it, and from a value to its tracer.

The value of a tracer may be a tracer of an outer level, and so on, down to a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import forward_ad

from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.dispatch.state import tls


def nested_tracers(value: Any, kinds: Any = Tracer) -> Iterator[Any]:
    """Yield a tracer and the tracers inside of it, the innermost level's first.

    Args:
        value: the tracer; nothing is yielded for another value.
        kinds: the class of tracers, or a union of classes; a tracer of another class ends the walk.
    """
    while isinstance(value, kinds):
        yield value
        value = getattr(value, "value", None)


def innermost_value(value: Any, kinds: Any = Tracer) -> Any:
    """Return the value inside of all tracers of some classes; other values are returned unchanged.

    Args:
        kinds: the class of tracers, or a union of classes.
    """
    while isinstance(value, kinds):
        value = getattr(value, "value", None)
    return value


def tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside of a tracer, the innermost level's first; none for another value."""
    while isinstance(value, Tracer):
        value = getattr(value, "value", None)
        if isinstance(value, torch.Tensor):
            yield value


def with_tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, and the tensors inside of it; none for another value."""
    if isinstance(value, torch.Tensor):
        yield value
        yield from tensors_inside(value)


def is_of_active_level(value: Any) -> bool:
    """True if a value is a tracer of an active level, also where a level stands in for its root."""
    if not isinstance(value, Tracer):
        return False
    root = value.dispatch_level.root
    return any(getattr(level, "root", None) is root for level in tls.state.levels)


def tracer_of(value: Any, args: Sequence[Any], level: TracerLevel) -> Any:
    """Return the tracer of a level with this value, among arguments and items of lists, or None.

    An operator that returns its argument itself, such as ``x.to(x.dtype)``, does so inside of
    transforms too: the code tests ``y is x`` before it writes into ``y``.
    """
    for arg in args:
        for x in arg if type(arg) is list or type(arg) is tuple else (arg,):
            if isinstance(x, Tracer) and x.dispatch_level is level and x.value is value:  # type: ignore[attr-defined]
                return x
    return None


def is_differentiated(value: Any) -> bool:
    """True if a tensor, or one inside of it, requires grad or has a tangent."""
    with DisableTorchFunctionSubclass():
        return any(
            x.requires_grad or forward_ad.unpack_dual(x).tangent is not None
            for x in with_tensors_inside(value)
        )
