"""tsfunc: function transforms for PyTorch that compose: vmap, grad, specialize."""

from __future__ import annotations

import torch

from tsfunc.releases import warn_if_untested

warn_if_untested(torch.__version__)  # before any import that can fail with a newer torch

# Every transform needs these modules. The names in `__init__.pyi` are loaded at their first use.
from tsfunc import dispatch, errors, ops, transforms  # noqa: E402, F401
from tsfunc._lazy import lazy_exports  # noqa: E402
from tsfunc.config import config  # noqa: E402, F401  # the object hides the module

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
# A star import leaves out Python's `map`, and the modules whose names are likely to be variables.
__all__ = [name for name in __all__ if name not in ("map", "program", "pytrees", "rage", "types")]
