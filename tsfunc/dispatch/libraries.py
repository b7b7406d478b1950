"""Tells the code of libraries from the code of the user.

NOTE [code of libraries]
A trace follows the code of the user: it scans functions and classes for the names that they read,
and guards these values. Modules, functions and classes of the standard library, of torch, of NumPy
and of installed packages are guarded by identity alone. Their *instances* (an ``nn.Dropout``, a
namespace, a deque) are guarded by the attributes and elements that were read of them. The search
for tensors from outside of a function (NOTE [tensors from outside] in ``bridge/writing/outside``)
follows the same code.

The name of the root package of the code's module decides, not the file that the code was compiled
from. A package is installed if its directory is one that installers write to. The module of a
function is that of its globals, since ``functools.wraps`` changes ``__module__``.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any, Final

_LIBRARIES: Final = frozenset({
    *sys.stdlib_module_names, "builtins", "torch", "numpy", "tsfunc",
})  # fmt: skip
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})  # of Python's install schemes
_C_FUNCTIONS: Final = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip


def root_package(code: Any) -> str:
    """Return the root package of the module of a module, class or function; "" if it has none."""
    name: Any
    if isinstance(code, types.ModuleType):
        name = code.__name__
    elif isinstance(code, types.FunctionType):
        name = code.__globals__.get("__name__")
    else:
        name = getattr(code, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_library(code: Any) -> bool:
    """Return True for a module, class or function of Python, torch, NumPy or this package."""
    return isinstance(code, _C_FUNCTIONS) or root_package(code) in _LIBRARIES


def is_installed(code: Any) -> bool:
    """Return True for a module, class or function of a library or of an installed package."""
    if is_library(code):
        return True
    package = sys.modules.get(root_package(code))
    if package is None:
        return False
    folders = getattr(package, "__path__", None)
    places = list(folders) if folders is not None else [getattr(package, "__file__", None) or ""]
    return any(map(_is_installed_at, places))


@functools.lru_cache(maxsize=1024)
def _is_installed_at(place: str) -> bool:
    """Return True if the directory around a package or module is one that installers write to."""
    return os.path.basename(os.path.dirname(place)) in _INSTALLED
