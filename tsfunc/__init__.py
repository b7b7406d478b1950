"""tsfunc: function transforms for PyTorch that compose: vmap, grad, specialize."""

from __future__ import annotations

from tsfunc.transforms.reverse import grad, grad_and_value, value_and_grad, vjp
from tsfunc.transforms.vmap import vmap

__all__ = ["grad", "grad_and_value", "value_and_grad", "vjp", "vmap"]
