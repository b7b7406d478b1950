"""Lazy loading of a package's names.

The subpackages are large, and a call of ``vmap`` needs few of them. The public names of a package
and the modules that define them are therefore in its stub, ``__init__.pyi``. A module is loaded
when one of its names is first used.

NOTE [Ctrl-C while something is loaded]
Many modules can't be imported again after an import that an exception cut off: they have registered
an operator or an algorithm under its name, which a second registration refuses. The first call of a
kind imports hundreds of modules, and takes long enough for a user to press Ctrl-C. Imports that are
large, and preparations that a process makes once, therefore run to their end first.
"""

from __future__ import annotations

import ast
import importlib
import signal
import sys
import threading

# The public function is Python, and may be interrupted itself.
from _signal import signal as _set_handler  # type: ignore[import-not-found]
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


def call_uninterrupted(call: Callable[..., _T], *args: Any) -> _T:
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
        return call_uninterrupted(importlib.import_module, module)
    return loaded


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, the ``__dir__`` and the ``__all__`` of a package with a stub.

    The stub (``__init__.pyi``) is the only list of the package's public names. A type checker reads
    it in place of the package's ``__init__.py``. Each of its lines has the form
    ``from module import name as name``, where ``module`` defines the name, or is the package of a
    module with that name.

    Args:
        package: its ``__name__``.
        file: its ``__file__``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: statement.module
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        home = load(homes[name])
        is_package = hasattr(home, "__path__")
        value = load(f"{homes[name]}.{name}") if is_package else getattr(home, name)
        setattr(sys.modules[package], name, value)  # later lookups do not call __getattr__
        return value

    return get, lambda: sorted(homes), sorted(homes)
