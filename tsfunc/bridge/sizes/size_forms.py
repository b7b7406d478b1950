"""Symbolic sizes as plain data, and back: ``["+", ["*", 2, "n"], 1]`` for ``2 * n + 1``.

Private names used here (torch 2.11 to 2.13): ``SymInt.node.expr`` is a size's expression of sympy;
the classes in it, some of them torch's own (``FloorDiv``), are told by their names.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_OPERATORS = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%",
    "Max": "max", "Min": "min",
}  # fmt: skip
_CALLED: dict[str, tuple[int | None, Callable[[Any, Any], Any]]] = {
    "+": (None, operator.add),
    "*": (None, operator.mul),
    "//": (2, operator.floordiv),
    "%": (2, operator.mod),
    "max": (None, torch.sym_max),
    "min": (None, torch.sym_min),
}
OPERATORS = frozenset(_CALLED)
_MOST_FACTORS = 8


def symbol_of(size: Any) -> Any:
    """The symbol that a size, or another number, is by itself; None for any other one."""
    expr = size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else None
    return expr if expr is not None and expr.is_symbol else None


def form_of_size(size: Any, names: Mapping[Any, str]) -> Any:
    """A size as plain data: a number, a name, a list of an operator and its operands.

    Args:
        size: an int or a symbolic one.
        names: what the symbols are called.

    Returns:
        The form, or None where the size is made of something else.
    """
    if isinstance(size, torch.SymBool | torch.SymFloat):  # a number that is no size
        symbol = symbol_of(size)
        return None if symbol is None else names.get(symbol)
    return _form(size.node.expr, names) if isinstance(size, torch.SymInt) else int(size)


def _form(expr: Any, names: Mapping[Any, str]) -> Any:
    if expr.is_Integer:
        return int(expr)
    if expr.is_symbol:
        return names.get(expr)
    kind = type(expr).__name__
    if kind == "Pow" and expr.exp.is_Integer and 1 < int(expr.exp) <= _MOST_FACTORS:
        parts = [expr.base] * int(expr.exp)
        kind = "Mul"
    else:
        parts = list(expr.args)
    forms = [_form(part, names) for part in parts]
    return None if kind not in _OPERATORS or None in forms else [_OPERATORS[kind], *forms]


def size_of_form(form: Any, sizes: Mapping[str, Any]) -> Any:
    """The size of a form, given those of the names.

    Raises:
        ValueError: it is no form.
    """
    if type(form) is int:
        return form
    if type(form) is str:
        return _named(form, sizes)
    if not isinstance(form, Sequence) or not form or form[0] not in OPERATORS:
        raise ValueError(f"{form!r} is no size")
    count, call = _CALLED[form[0]]
    if len(form) < 3 or (count is not None and len(form) != count + 1):
        raise ValueError(f"{form[0]!r} of {len(form) - 1} is no size")
    return functools.reduce(call, (size_of_form(part, sizes) for part in form[1:]))


def _named(name: str, sizes: Mapping[str, Any]) -> Any:
    if name not in sizes:
        raise ValueError(f"there is no dim {name[:40]!r}")
    return sizes[name]
