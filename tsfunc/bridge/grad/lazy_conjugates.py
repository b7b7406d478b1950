"""Plain tensors that are lazily conjugated or negated, as arguments beside tracers.

NOTE [lazy conjugates]
The kernels that materialize a lazy conjugate come after autograd's and before those of tracers.
They copy it with ``clone``. A formula of a backward pass that multiplies a batched cotangent by
``w.conj()``, where ``w`` is a plain tensor, would therefore reach the rule of the product with a
copy that has no graph: the next derivative by ``w`` would be wrong. Here autograd sees the copy. A
tracer has no lazy bit, so that only plain tensors are concerned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import (
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.registrations import on_first_level, register_kernels
from tsfunc.bridge.tracers.torch_state import AUTOGRAD, RANDOM_KEY_NAME, below_autograd
from tsfunc.bridge.tracers.tracer import Tracer


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
    with _ForceDispatchKeyGuard(include, exclude - AUTOGRAD):
        return overload(x, **kwargs)


_handlers = compiled.load()
if _handlers is None:
    on_first_level(register_kernels, RANDOM_KEY_NAME, {"aten::clone": _clone})
else:  # the same kernel, which every copy in a level passes
    on_first_level(_handlers.install_copy_of_conjugates)
