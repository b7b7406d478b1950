"""Lazy zero tangents that meet tracers.

NOTE [lazy zeros]
torch makes the tangent that a tensor lacks a lazy zero: a tensor without memory, whose kernels come
before those of tracers. The product of a lazy zero and any tensor is a lazy zero, also if the
tensor has an infinite element: an argument without a tangent contributes nothing. A product of a
lazy zero and a tracer would be a plain tensor too, recorded as computed from the tracer, which a
graph outside of the tracer's level then keeps. A pullback that ``vmap`` maps, of a function that
calls ``jvp``, makes such products. Here lazy zeros that meet a tracer become plain zeros, and the
call goes to the tracer. A result that is zero is a tracer of plain zeros, which quotients of it are
not: they are rewritten (``QUOTIENTS`` in ``ops/differentiable_decompositions``).

Private names used here (torch 2.13 and 2.14): ``Tensor._is_zerotensor`` recognizes lazy zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tsfunc.bridge.tracers.registrations import on_first_level, register_kernels
from tsfunc.bridge.tracers.tracer import Tracer

# The operators that torch computes lazily, with the operands that make the result zero. All others
# get zeros in memory.
_LAZY = {
    "aten::add.Tensor": (),
    "aten::sub.Tensor": (),
    "aten::mul.Tensor": (0, 1),
    "aten::div.Tensor": (0,),
    "aten::linalg_cross": (0, 1),
}
_KEY = "ZeroTensor"


def _call_on_lazy_zero(
    lazy: Any,
    decisive: Sequence[int],
    overload: Any,
    rest: Any,
    keys: Any,
    x: Any,
    y: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call an operator on a lazy zero and another operand.

    Args:
        lazy: torch's own kernel.
        decisive: the operands of which a lazy zero makes the result zero.
        overload: the operator.
        rest: the keys after the one that this is a kernel of.
        keys: the keys of the call.
        x: the first operand.
        y: the second operand.
        args: the further arguments.
        kwargs: the keyword arguments.
    """
    operands = x, y
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    tracers = [value for value in tensors if isinstance(value, Tracer)]
    if len(tensors) == 2 and not tracers:
        return lazy.call_boxed(keys, x, y, *args, **kwargs)
    zeros = [isinstance(value, torch.Tensor) and value._is_zerotensor() for value in operands]
    if not any(zeros):  # C++ hands Python numbers, lazy zeros among them, to Python as numbers
        zeros = [not isinstance(value, torch.Tensor) for value in operands]
    zero = any(zeros[place] for place in decisive)
    if zero and len(tensors) == 2 and x.shape == y.shape and x.dtype == y.dtype:
        return torch.zeros_like(tracers[0])
    materialized = _materialized(x), _materialized(y)
    if len(tensors) == 2:
        out = overload.redispatch(keys & rest, *materialized, *args, **kwargs)
    else:
        out = overload.overloadpacket(*materialized, *args, **kwargs)
    return torch.zeros_like(out) if zero else out


def _materialized(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value._is_zerotensor():
        zero: torch.Tensor = torch.zeros((), dtype=value.dtype, device=value.device)
        return zero.expand(value.shape)
    return value


on_first_level(
    register_kernels,
    _KEY,
    {
        name: functools.partial(_call_on_lazy_zero, torch.library.get_kernel(name, _KEY), decisive)
        for name, decisive in _LAZY.items()
    },
)
