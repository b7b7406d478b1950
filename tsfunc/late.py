"""Names of a package that are loaded when they are first asked for.

The rooms are large, and who calls ``vmap`` has no use for most of them. So a package that shows
what its modules make has a table of where each name is made, and a module is loaded with the first
of its names. The package imports the same names under ``TYPE_CHECKING``, for tools that read code
(``tests/test_imports.py`` holds the two together).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def late(
    package: str, names: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        names: the names that it shows, apart by blanks, by the module of it that makes them.
        modules: those of its modules that it shows, each by the last part of its name.

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
        setattr(sys.modules[package], name, value)  # asked for no more
        return value

    def shown() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *shown_modules})

    return get, shown
