"""The user's code, and code of libraries; the lines of it that messages and reports name.

NOTE [code of libraries]
A trace follows the code of the user: it scans functions and classes for the names that they read,
and guards these values. Modules, functions and classes of the standard library, of torch, of NumPy
and of installed packages are guarded by identity alone. Their *instances* (an ``nn.Dropout``, a
namespace, a deque) are guarded by the attributes and elements that were read of them.

The name of the root package of the code's module decides, not the file that the code was compiled
from. A package is installed if its directory is one that installers write to. The module of a
function is that of its globals, since ``functools.wraps`` changes ``__module__``.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import re
import sys
import types
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from tsfunc import rage
from tsfunc.tracebacks import GENERATED, LIBRARIES, WRAPPERS, Location

_OWN = __name__.partition(".")[0]
_PACKAGES = frozenset({_OWN, "torch", *(module.__name__ for module in WRAPPERS)})
_LIBRARY_PACKAGES: Final = frozenset({
    *sys.stdlib_module_names, "builtins", "torch", "numpy", "tsfunc",
})  # fmt: skip
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})  # of Python's install schemes
_C_FUNCTIONS: Final = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip


def package_of(frame: FrameType) -> str:
    """Return the root package of a frame's module; an empty string for code without a module."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_user_frame(frame: FrameType) -> bool:
    """True if a frame runs code of neither this package nor torch."""
    name = frame.f_globals.get("__name__")
    if type(name) is str and name in _library_modules:
        return False
    package = package_of(frame)
    if package in _PACKAGES:
        _library_modules.add(name)
        return False
    return package != "" or not frame.f_code.co_filename.startswith(GENERATED)


_library_modules: set[Any] = set()  # the names of modules of these packages, as they are found


def user_frame() -> FrameType:
    """Return the innermost frame outside this package and torch; else the outermost frame."""
    frame = sys._getframe(1)
    while (back := frame.f_back) is not None and not is_user_frame(frame):
        frame = back
    return frame


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning at the user's line, so that filters and once-per-line rules apply to it."""
    frame = user_frame()
    at = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    rage.record("warning", type=category.__name__, message=message, at=at)
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<string>"),  # None would suppress the warning
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def called_by_user(passing: Callable[[FrameType], bool] = lambda frame: False) -> bool:
    """True if the innermost frame outside torch is the user's and not this package's.

    Args:
        passing: predicate for further frames that only pass a call on and are skipped.
    """
    frame = sys._getframe(1)
    if package_of(frame) == _OWN and frame.f_back is not None:
        frame = frame.f_back  # the caller of this function
    while frame.f_back is not None and (package_of(frame) == "torch" or passing(frame)):
        frame = frame.f_back
    return package_of(frame) != _OWN


def user_location() -> Location:
    """Return the line of the user's code that runs now."""
    frame = user_frame()
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def user_call_location() -> str:
    """Return the location of the user's call that runs now, with its column.

    Two calls on one line have different locations, from Python 3.11 on.
    """
    frame = user_frame()
    code, line = frame.f_code, frame.f_lineno
    column = None
    if hasattr(code, "co_positions"):
        *_, column, _ = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    at = f"{line}" if column is None else f"{line}:{column + 1}"
    return f"{code.co_filename}:{at}, in {code.co_name}"


def error_location(error: BaseException) -> Location:
    """Return the innermost line of user code in an error's traceback, else the one that runs now.

    The traceback has no such line if the user's code is outside of the caller of this function.
    """
    location = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            location = Location(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return location or user_location()


def source_line(location: Location, before: str = "") -> str:
    """Return the text of a line after the prefix ``before``; an empty string without a source."""
    text = linecache.getline(location.file, location.line).strip()
    return f"{before}{text}" if text else ""


def condition_text(location: Location) -> str | None:
    """Return the condition of a line's only ``if``, ``while`` or ``assert``; None otherwise."""
    _, *others = re.split(r"\b(?:if|elif|while|assert)\b", source_line(location))
    if len(others) != 1:
        return None
    rest = others[0]
    for end in [match.start() for match in re.finditer(r"[:,)\]}]|\belse\b|\bfor\b|$", rest)]:
        try:
            return ast.unparse(ast.parse(rest[:end].strip(), mode="eval").body)
        except SyntaxError:
            continue
    return None


# --- code of libraries


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
    return isinstance(code, _C_FUNCTIONS) or root_package(code) in _LIBRARY_PACKAGES


def is_installed(code: Any) -> bool:
    """Return True for a module, class or function of a library or of an installed package."""
    if isinstance(code, _C_FUNCTIONS):
        return True
    package = root_package(code)
    return package in _LIBRARY_PACKAGES or _is_installed_package(sys.modules.get(package))


@functools.lru_cache(maxsize=1024)
def _is_installed_package(package: types.ModuleType | None) -> bool:
    """Return True if the directory around a package or module is one that installers write to."""
    folders = getattr(package, "__path__", None)
    paths = [getattr(package, "__file__", None) or ""] if folders is None else list(folders)
    return any(os.path.basename(os.path.dirname(path)) in _INSTALLED for path in paths)
