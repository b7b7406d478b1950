"""Custom operators in forward mode.

``torch.library.register_autograd`` gives an operator that ``custom_op`` made a pullback, and no
forward formula. torch's kernel of it differentiates where something requires a gradient; where
nothing does it goes past autograd, and tangents are lost without a word. Here a call with tangents
is met before that (NOTE [the factory keys]) and refused as that of any operator without a formula,
so that ``jvp`` finds the tangent by the pullback.

Private names used here (torch 2.11 to 2.13): ``_library.custom_ops.OPDEFS`` has what ``custom_op``
made, each with the library ``_lib`` that it is registered in, its ``_opoverload``, and the pullback
as ``_backward_fn``; ``DisableTorchFunctionSubclass`` reads a tracer's own tangent.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad

from tsfunc import pytrees
from tsfunc.bridge.torch_state import RANDOM_KEY_NAME, after

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_custom_operators() -> None:
    """Before forward mode begins: those that were made since are watched too."""
    if OPDEFS:
        for made in [made for made in OPDEFS.values() if made not in _watched]:
            _watched.add(made)
            made._lib.impl(made._opoverload, _kernel(made), RANDOM_KEY_NAME, with_keyset=True)


def _kernel(made: Any) -> Any:
    rest = after(RANDOM_KEY_NAME)
    overload = made._opoverload
    find = weakref.ref(made)

    def operator(keys: Any, *args: Any, **kwargs: Any) -> Any:
        made = find()
        if forward_ad._current_level >= 0 and made is not None and made._backward_fn is not None:
            _refuse_tangents(overload.name(), (args, kwargs))
        return overload.redispatch(keys & rest, *args, **kwargs)

    return operator


def _refuse_tangents(name: str, values: Any) -> None:
    tensors = [x for x in pytrees.leaves_of(values) if isinstance(x, torch.Tensor)]
    with DisableTorchFunctionSubclass():
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(f"{name} has a pullback, but does not support forward AD")
