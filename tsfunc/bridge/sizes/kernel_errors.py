"""The error of a call in a trace: the class that the operator's kernel raises.

NOTE [errors of kernels]
A function may handle an error, as ``try: x.view(-1)`` with ``except RuntimeError`` does, and a
program is its function. torch's rules for fake tensors refuse what the kernels refuse, but some
raise another class (``view`` a ValueError, ``cat`` an IndexError). A call that a rule has refused
is therefore repeated on small tensors of ones with the same metadata: if the kernel raises an error
of another class, that error replaces the rule's.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tsfunc import pytrees
from tsfunc.bridge.sizes.strides import hint_of, layout_of
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.user_queries import SYMBOLIC
from tsfunc.ops.registry import Args, Kwargs

_MOST_ELEMENTS: Final = 1 << 22  # in the memory of one argument


def error_of_kernel(op: TorchOperator, args: Args, kwargs: Kwargs, error: Exception) -> Exception:
    """Return the error that the kernel raises for a call that torch's rule has refused.

    Args:
        args, kwargs: fake values.
        error: the error of the rule; it is returned if the kernel's error has its class, or if the
            kernel can't be called or raises nothing.
    """
    with torch_state.outside_all_transforms(), torch.no_grad():
        try:
            real = pytrees.tree_map(_real, (args, dict(kwargs)))
        except Exception:  # a dtype or a layout without ones
            return error
        try:
            op.overload(*real[0], **real[1])
        except Exception as found:
            return error if isinstance(error, type(found)) else found.with_traceback(None)
    return error


def _real(value: Any) -> Any:
    """Return a tensor of ones on the CPU for a fake tensor; for a symbolic number, its hint."""
    if isinstance(value, SYMBOLIC):
        return hint_of(value) if isinstance(value, torch.SymInt) else value.node.hint
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        raise TypeError(value)
    (shape, strides), offset = layout_of(value), hint_of(value.storage_offset())
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    size = offset + (last + 1 if 0 not in shape else 0)
    if size > _MOST_ELEMENTS:
        raise MemoryError(size)
    return torch.ones(size, dtype=value.dtype).as_strided(shape, strides, offset)
