"""Lazy zero tangents that meet tracers.

NOTE [lazy zeros]
torch makes the tangent that a tensor lacks a lazy zero: a tensor without memory, whose kernels come
before those of tracers. A product of a lazy zero and a tracer would be a lazy zero again: a plain
tensor, recorded as computed from the tracer, which a graph outside of the tracer's level then
keeps. A pullback that ``vmap`` maps, of a function that calls ``jvp``, makes such products. Here
lazy zeros that meet a tracer become plain zeros, and the call goes to the tracer.

Private names used here (torch 2.13 and 2.14): ``Tensor._is_zerotensor`` recognizes lazy zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tsfunc.bridge.tracers.operators import overload_of
from tsfunc.bridge.tracers.torch_state import after
from tsfunc.bridge.tracers.tracer import Tracer

# The operators that torch computes lazily. All others get zeros in memory.
_LAZY = "add.Tensor sub.Tensor mul.Tensor div.Tensor linalg_cross".split()
_KEY = "ZeroTensor"

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register the kernels, once a process."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Ww]arning only once")
        for name in _LAZY:
            lazy = torch.library.get_kernel(f"aten::{name}", _KEY)
            library.impl(name, _kernel(overload_of(f"aten::{name}"), lazy), _KEY, with_keyset=True)


def _kernel(overload: Any, lazy: Any) -> Callable[..., Any]:
    rest = after(_KEY)
    packet = overload.overloadpacket

    def operator(keys: Any, x: Any, y: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            # C++ hands Python numbers, lazy zeros among them, to Python as numbers.
            return packet(_in_memory(x), _in_memory(y), **kwargs)
        if isinstance(x, Tracer) or isinstance(y, Tracer):
            return overload.redispatch(keys & rest, _in_memory(x), _in_memory(y), **kwargs)
        return lazy.call_boxed(keys, x, y, **kwargs)

    return operator


def _in_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value._is_zerotensor():
        zero: torch.Tensor = torch.zeros((), dtype=value.dtype, device=value.device)
        return zero.expand(value.shape)
    return value
