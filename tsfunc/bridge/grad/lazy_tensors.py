"""Plain tensors without memory of their own that meet tracers: lazy conjugates and lazy zeros.

NOTE [lazy conjugates]
The kernels that materialize a lazy conjugate come after autograd's and before those of tracers, and
copy it with ``clone``. A formula of a backward pass that multiplies a batched cotangent by
``w.conj()``, where ``w`` is a plain tensor, would therefore reach the rule of the product with a
copy that has no graph: the next derivative by ``w`` would be wrong. The kernel of ``clone`` in this
module lets autograd see the copy. A tracer has no lazy bit, so that only plain tensors are
concerned.

NOTE [lazy zeros]
torch makes the tangent that a tensor lacks a lazy zero: a tensor without memory, whose kernels come
before those of tracers. A product of a lazy zero and a tracer would be a lazy zero again: a plain
tensor, recorded as computed from the tracer, which a graph outside of the tracer's level then
keeps. A pullback that ``vmap`` maps, of a function that calls ``jvp``, makes such products. The
kernels in this module turn a lazy zero that meets a tracer into plain zeros, and call the tracer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.registrations import on_first_level, register_kernels
from tsfunc.bridge.tracers.torch_state import AUTOGRAD, RANDOM_KEY_NAME, below_autograd
from tsfunc.bridge.tracers.tracer import Tracer

# --- lazy conjugates


def _clone(overload: Any, rest: Any, keys: Any, x: torch.Tensor, **kwargs: Any) -> Any:
    """Copy a tensor while a level is active.

    Args:
        overload: ``clone``, which materializes a lazy conjugate.
        rest: the keys after the one that this is a kernel of.
        kwargs: the memory format.
    """
    if isinstance(x, Tracer) or not (x.is_conj() or x.is_neg()) or not below_autograd():
        return overload.redispatch(keys & rest, x, **kwargs)
    include, exclude = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    # A trace's mode would record the copy, which a kernel computes with.
    with DisableTorchFunction(), _ForceDispatchKeyGuard(include, exclude - AUTOGRAD):
        return overload(x, **kwargs)


_handlers = compiled.load()
if _handlers is None:
    on_first_level(register_kernels, RANDOM_KEY_NAME, {"aten::clone": _clone})
else:  # the same kernel, which every copy in a level passes
    on_first_level(_handlers.install_copy_of_conjugates)


# --- lazy zeros


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
