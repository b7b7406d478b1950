"""Names of a package that are loaded on first access.

The subpackages are large, and a program that calls ``vmap`` needs only a few of them. A package
therefore has a table from each public name to the module that defines the name, and imports that
module on the first access to one of its names. The package imports the same names under
``TYPE_CHECKING`` for tools that read code (``tests/test_imports.py`` compares the two lists).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def late(
    package: str, names: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` functions of a package.

    Args:
        package: the ``__name__`` of the package.
        names: the public names, separated by blanks, by the submodule that defines them.
        modules: the submodules that are public themselves; the public name is the last name part.

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
        setattr(sys.modules[package], name, value)  # later accesses skip __getattr__
        return value

    def shown() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *shown_modules})

    return get, shown
