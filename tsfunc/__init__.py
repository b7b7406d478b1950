"""tsfunc: function transforms for PyTorch that compose: vmap, grad, specialize."""

from __future__ import annotations

from tsfunc.transforms.vmap import vmap

__all__ = ["vmap"]
