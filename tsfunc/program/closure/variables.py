"""Variables of modules, classes and functions: their locations and former values.

The module of a variable's owner decides whether the variable belongs to the user.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from tsfunc.program.closure.side_effects import MISSING

CODE = (
    types.ModuleType, type, property, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType, functools.partial,
)  # fmt: skip


class Variable:
    """A variable from outside: its location, and its value when it was first met.

    Args:
        owner: a namespace (dict), a cell, a module or a class.
        name: the name of the variable; None for the content of a cell.
        text: the user's spelling of it.
        at: the name of the owner in the generated code.
        line: the line that reads or assigns it; empty if it is not known.
    """

    def __init__(self, owner: Any, name: str | None, text: str, at: str, line: str) -> None:
        self.owner, self.name, self.text, self.at, self.line = owner, name, text, at, line
        self.before = self.read()
        self.is_read = self.is_written = False
        self._is_own = isinstance(owner, dict) or name is None or name in vars(owner)

    def read(self) -> Any:
        """Return its current value, or ``MISSING``."""
        if self.name is None:
            try:
                return self.owner.cell_contents
            except ValueError:
                return MISSING
        places = [self.owner] if isinstance(self.owner, dict) else map(vars, bases_of(self.owner))
        return next((place[self.name] for place in places if self.name in place), MISSING)

    @property
    def target(self) -> str:
        """The Python expression of the variable in an update, with ``{}`` for the owner."""
        if self.name is None:
            return "{}.cell_contents"
        return f"{{}}[{self.name!r}]" if isinstance(self.owner, dict) else f"{{}}.{self.name}"

    def put_back(self) -> None:
        """Restore the value that the variable had when it was first met."""
        missing = self.before is MISSING or not self._is_own
        if self.name is None:
            if missing:
                del self.owner.cell_contents
            else:
                self.owner.cell_contents = self.before
        elif isinstance(self.owner, dict):
            if missing:
                del self.owner[self.name]
            else:
                self.owner[self.name] = self.before
        elif missing:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def is_empty(cell: types.CellType) -> bool:
    """Return True if a variable of an enclosing function has no value yet."""
    try:
        cell.cell_contents  # noqa: B018 - it may raise
    except ValueError:
        return True
    return False


def bases_of(owner: Any) -> tuple[Any, ...]:
    """Return the objects that may hold an attribute of a module, class or function."""
    if not isinstance(owner, type):
        return (owner,)
    metas = [meta for meta in type.mro(type(owner)) if not is_library_code(meta)]
    return *owner.__mro__, *metas


LIBRARIES = frozenset({*sys.stdlib_module_names, "builtins", "torch", "tsfunc"})


def is_followed(owner: Any, name: str) -> bool:
    """Return True if an attribute of a module, class or function is guarded itself.

    It is not if its owner is library code, or if it is code of an installed package.
    """
    has_members = isinstance(owner, types.ModuleType | types.FunctionType | type)
    if not has_members or is_library_code(owner):
        return False
    if name.startswith("__") and name.endswith("__"):
        return isinstance(owner, types.ModuleType)
    return not (isinstance(vars(owner).get(name), CODE) and is_installed(owner))


def is_library_code(owner: Any) -> bool:
    """Return True if a module, class or function is of the standard library, torch or tsfunc."""
    module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return (module or "").partition(".")[0] in LIBRARIES


def is_installed(code: Any) -> bool:
    """Return True if a function, class or module belongs to an installed package or to tsfunc."""
    if isinstance(code, types.FunctionType):
        filename = code.__code__.co_filename
    elif isinstance(code, types.ModuleType):
        filename = vars(code).get("__file__") or ""
    else:
        filename = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    return "site-packages" in filename or filename.startswith(PACKAGE)


PACKAGE = __file__.rsplit("program", 1)[0]
