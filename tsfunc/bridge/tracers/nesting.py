"""Walks from a tracer to the values inside of it.

The value of a tracer may be a tracer of an outer level, and so on, down to a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import forward_ad

from tsfunc.bridge.tracers.tracer import Tracer


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


def is_differentiated(value: Any) -> bool:
    """True if a tensor, or one inside of it, requires grad or has a tangent."""
    with DisableTorchFunctionSubclass():
        return any(
            x.requires_grad or forward_ad.unpack_dual(x).tangent is not None
            for x in with_tensors_inside(value)
        )
