"""Lazy loading of a package's names.

The subpackages are large, and a call of ``vmap`` needs few of them. A package therefore has a
table of its public names and the modules that define them. A module is loaded when one of its
names is first used. The package imports the same names under ``TYPE_CHECKING``, for tools that
read code (``tests/test_imports.py`` compares the two).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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
    homes = {name: module for module, made in names.items() for name in made.split()}
    shown_modules = {module.rpartition(".")[2]: module for module in modules}

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        elif name in shown_modules:
            value = importlib.import_module(f"{package}.{shown_modules[name]}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        setattr(sys.modules[package], name, value)  # later lookups do not call __getattr__
        return value

    def shown() -> list[str]:
        """Return the public names."""
        here = vars(sys.modules[package])
        return sorted({*here.get("__all__", here), *homes, *shown_modules})

    return get, shown
