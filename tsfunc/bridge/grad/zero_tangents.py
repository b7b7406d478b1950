"""Lazy zero tangents that meet tracers.

NOTE [lazy zeros]
torch makes the tangent that a tensor lacks a lazy zero: a tensor without memory, whose kernels come
before those of tracers. A product of a lazy zero and a tracer would be a lazy zero again: a plain
tensor, recorded as computed from the tracer, which a graph outside of the tracer's level then
keeps. A pullback that ``vmap`` maps, of a function that calls ``jvp``, makes such products. Here
lazy zeros that meet a tracer become plain zeros, and the call goes to the tracer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tsfunc.bridge.tracers.registrations import on_first_level, register_kernels
from tsfunc.bridge.tracers.tracer import Tracer

# The operators that torch computes lazily. All others get zeros in memory.
_LAZY = "add.Tensor sub.Tensor mul.Tensor div.Tensor linalg_cross".split()
_KEY = "ZeroTensor"


def _call_on_lazy_zero(
    lazy: Any, overload: Any, rest: Any, keys: Any, x: Any, y: Any, **kwargs: Any
) -> Any:
    """Call an operator on a lazy zero and another operand.

    Args:
        lazy: torch's own kernel.
        rest: the keys after the one that this is a kernel of.
    """
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        # C++ hands Python numbers, lazy zeros among them, to Python as numbers.
        return overload.overloadpacket(_materialize(x), _materialize(y), **kwargs)
    if isinstance(x, Tracer) or isinstance(y, Tracer):
        return overload.redispatch(keys & rest, _materialize(x), _materialize(y), **kwargs)
    return lazy.call_boxed(keys, x, y, **kwargs)


def _materialize(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value._is_zerotensor():
        zero: torch.Tensor = torch.zeros((), dtype=value.dtype, device=value.device)
        return zero.expand(value.shape)
    return value


on_first_level(
    register_kernels,
    _KEY,
    {
        name: functools.partial(_call_on_lazy_zero, torch.library.get_kernel(name, _KEY))
        for name in (f"aten::{each}" for each in _LAZY)
    },
)
