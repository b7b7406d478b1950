"""``t_()``, ``squeeze_()`` and their like where autograd is recorded at the tracer's level.

C++ goes on taking a tensor whose shape was changed for the view that it was before, and the views
of it for views of what it is now: it makes their gradients again by repeating the view operators.
So the object that the user has comes to stand for the view that the functional operator gives. What
it stood for stays what it was, to the other views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from tsfunc.bridge.tracers.tracer import METHODS, Tracer
from tsfunc.bridge.writing.turning import become

_NAMES = "t transpose swapaxes swapdims squeeze unsqueeze as_strided".split()


def _reshape(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    x = args[0] if args else None
    if not isinstance(x, Tracer) or not x.dispatch_level.alive:
        return NotImplemented
    if not x.dispatch_level.autograd or not torch.is_grad_enabled():
        return NotImplemented
    with DisableTorchFunctionSubclass():
        if x.is_leaf and x.requires_grad:
            return NotImplemented  # refused by torch
    become(x, getattr(torch.Tensor, func.__name__[:-1])(*args, **kwargs))
    return x


for _name in _NAMES:
    METHODS[getattr(torch.Tensor, f"{_name}_")] = _reshape
METHODS[torch.as_strided_] = _reshape
