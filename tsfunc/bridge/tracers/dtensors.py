"""DTensors among the inputs and outputs of differentiated functions.

``distribute_tensor`` detaches its argument: the DTensor that it returns is a leaf, whose derivative
by the argument would be zero without an error. Derivatives refuse it instead, for tensors with
tangents and for the inputs of reverse mode.

``distribute_tensor`` calls ``assert_no_mixed_partial_types`` on its placements after its checks of
the argument, and calls the argument ``tensor``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import forward_ad

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.errors import MissingRuleError


def is_dtensor(value: Any) -> bool:
    kind = _dtensor()
    return kind is not None and isinstance(value, kind)


def holds_dtensor(value: Any) -> bool:
    """True if a value is a DTensor, or a transform's tensor with a DTensor inside."""
    if _dtensor() is None:
        return False
    return is_dtensor(innermost_value(value))


def _dtensor() -> Any:
    """Return the class, or None before the module that defines it is loaded."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


class _Inputs(threading.local):
    """``active``: the inputs of the functions that this thread differentiates in reverse mode."""

    active: tuple[torch.Tensor, ...] = ()


_inputs = resets(_Inputs())


class refusing_distribution:
    """Context manager: ``distribute_tensor`` refuses the inputs, and tensors with tangents."""

    __slots__ = ("_before", "_own")

    def __init__(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        self._own = tuple(inputs)

    def __enter__(self) -> None:
        _watch_distribution()
        self._before = _inputs.active
        _inputs.active = self._before + self._own

    def __exit__(self, *error: object) -> None:
        _inputs.active = self._before


def _watch_distribution() -> None:
    """Add a check to those of ``distribute_tensor``, once there are processes.

    The function that is differentiated may import the module, so that it is loaded here.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    module: Any = importlib.import_module("torch.distributed.tensor._api")
    checks = getattr(module, "assert_no_mixed_partial_types", None)
    if checks is None or hasattr(checks, "refuses_inputs"):
        return
    code = _code_of_distribution()

    def check(placements: Any) -> None:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None and caller.f_code is code:
            _refuse_distribution(caller.f_locals["tensor"])
        checks(placements)

    check.refuses_inputs = True  # type: ignore[attr-defined]
    module.assert_no_mixed_partial_types = check


def _code_of_distribution() -> CodeType | None:
    function = getattr(sys.modules.get("torch.distributed.tensor"), "distribute_tensor", None)
    return None if function is None else inspect.unwrap(function).__code__


def _refuse_distribution(tensor: torch.Tensor) -> None:
    if any(tensor is active for active in _inputs.active):
        raise MissingRuleError(
            "grad: expected a conversion to a DTensor that has a derivative, got "
            "distribute_tensor, which detaches its argument. Use DTensor.from_local(x, mesh, "
            "[Replicate()] * mesh.ndim).redistribute(mesh, placements), or distribute the tensor "
            "before the transform."
        )
    with DisableTorchFunctionSubclass():
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("distribute_tensor does not support forward AD")


def converts_to_dtensor(error: BaseException) -> bool:
    """True if a conversion between plain tensors and DTensors raised the error.

    The conversions are methods of DTensor and ``distribute_tensor``. They have no rule for forward
    mode, and the pullbacks of the methods cut the graph of a cotangent.
    """
    kind = _dtensor()
    if kind is None:
        return False
    # Decorators are unwrapped, because functions that are not methods share the code of a wrapper.
    methods = [inspect.unwrap(getattr(m, "__func__", m)) for m in vars(kind).values()]
    codes = {getattr(method, "__code__", None) for method in methods}
    codes.add(_code_of_distribution())
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def unit_cotangent(value: torch.Tensor, *, like_value: bool) -> torch.Tensor:
    """Return the cotangent 1 for a scalar.

    Args:
        like_value: True to make the cotangent from the value, as DTensors require. Otherwise
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
