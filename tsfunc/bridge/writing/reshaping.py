"""``t_()``, ``squeeze_()`` and similar methods, with autograd recording at the tracer's level.

After an in-place change of shape, C++ autograd still treats the tensor as its previous view, and
the views of the tensor as views of its new form: C++ repeats the view operators to rebuild their
gradients. Therefore the user's object becomes the view that the functional operator returns. The
other views keep the previous tensor, unchanged.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass

from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.bridge.writing.promotion import swap_identity
from tsfunc.ops.registry import Args, Kwargs

_NAMES = "t transpose swapaxes swapdims squeeze unsqueeze".split()


def reshape_in_place(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the tensor the view that the functional operator returns."""
    x = args[0] if args else None
    if not isinstance(x, Tracer) or not x.dispatch_level.alive:
        return NotImplemented
    if not x.dispatch_level.autograd or not torch.is_grad_enabled():
        return NotImplemented
    with DisableTorchFunctionSubclass():
        if x.is_leaf and x.requires_grad:
            return NotImplemented  # torch refuses the call
    swap_identity(x, getattr(torch.Tensor, func.__name__[:-1])(*args, **kwargs))
    return x


function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD, reshape_in_place, *(getattr(torch.Tensor, f"{name}_") for name in _NAMES)
)
