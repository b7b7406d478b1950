"""Lazy loading of a package's names.

The subpackages are large, and a call of ``vmap`` needs few of them. A package therefore has a
table of its public names and the modules that define them. A module is loaded when one of its
names is first used. The package imports the same names under ``TYPE_CHECKING``, for tools that
read code (``tests/test_imports.py`` compares the two).

NOTE [Ctrl-C while something is loaded]
Many modules can't be imported again after an import that an exception cut off: they have registered
an operator or an algorithm under its name, which a second registration refuses. The first call of a
kind imports hundreds of modules, and takes long enough for a user to press Ctrl-C. Imports that are
large, and preparations that a process makes once, therefore run to their end first.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading

# The public function is Python, and may be interrupted itself.
from _signal import signal as _set_handler  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


def uninterrupted(call: Callable[..., _T], *args: Any) -> _T:
    """Make a call; Ctrl-C waits for its end: NOTE [Ctrl-C while something is loaded].

    Raises:
        Exception: any exception of the call.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        return call(*args)  # Python's handlers run on the main thread
    interrupts: list[Any] = []
    try:
        _set_handler(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
        return call(*args)
    finally:
        _set_handler(signal.SIGINT, before)
        if interrupts:
            before(*interrupts[0])


def load(module: str) -> Any:
    """Import a module; Ctrl-C waits for the end."""
    loaded = sys.modules.get(module)
    if loaded is None or getattr(loaded.__spec__, "_initializing", False):
        return uninterrupted(importlib.import_module, module)
    return loaded


def lazy_exports(
    package: str, names: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        names: a dict from each of the package's modules to its public names, separated by blanks.
        modules: the public modules of the package. The last part of its name is a module's public
            name.

    Example: see ``tsfunc/types/__init__.py``.
    """
    homes = {name: module for module, exported in names.items() for name in exported.split()}
    shown_modules = {module.rpartition(".")[2]: module for module in modules}

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(load(f"{package}.{homes[name]}"), name)
        elif name in shown_modules:
            value = load(f"{package}.{shown_modules[name]}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        setattr(sys.modules[package], name, value)  # later lookups do not call __getattr__
        return value

    def shown() -> list[str]:
        """Return the public names."""
        namespace = vars(sys.modules[package])
        return sorted({*namespace.get("__all__", namespace), *homes, *shown_modules})

    return get, shown
