"""DTensors among the inputs and outputs of differentiated functions."""

from __future__ import annotations

import inspect
import sys
import traceback
from typing import Any

import torch

from tsfunc.bridge.tracers.tracer import Tracer


def is_dtensor(value: Any) -> bool:
    """True if a value is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(value, kind)


def holds_dtensor(value: Any) -> bool:
    """True if a value is a DTensor, or a transform's tensor with a DTensor inside."""
    if _dtensor() is None:
        return False
    while isinstance(value, Tracer):
        value = getattr(value, "value", None)
    return is_dtensor(value)


def _dtensor() -> Any:
    """Return the class, or None before the module that defines it is loaded."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def converts_to_dtensor(error: BaseException) -> bool:
    """True if a method of DTensor raised the error: a conversion from or to plain tensors.

    Such a conversion has no rule for forward mode, and its pullback cuts the graph of a cotangent.
    """
    kind = _dtensor()
    if kind is None:
        return False
    # Decorators are unwrapped, because functions that are not methods share the code of a wrapper.
    methods = [inspect.unwrap(getattr(m, "__func__", m)) for m in vars(kind).values()]
    codes = {getattr(method, "__code__", None) for method in methods}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def unit_cotangent(value: torch.Tensor, *, like_value: bool) -> torch.Tensor:
    """Return the cotangent 1 for a scalar.

    Args:
        value: the scalar.
        like_value: whether to make the cotangent from the value, as DTensors require. Otherwise
            only the dtype and device are read, so that a program need not compute the value.
    """
    if like_value or holds_dtensor(value):
        return torch.ones_like(value)
    return torch.ones((), dtype=value.dtype, device=value.device)


def replicated_like(cotangent: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return a plain cotangent of a DTensor as a replicated DTensor."""
    if not is_dtensor(output) or is_dtensor(cotangent):
        return cotangent
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(output, DTensor)
    mesh = output.device_mesh
    return DTensor.from_local(cotangent, mesh, [Replicate()] * mesh.ndim, run_check=False)
