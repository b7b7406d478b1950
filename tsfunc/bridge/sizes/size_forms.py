"""Symbolic sizes as plain data and back: ``["+", ["*", 2, "n"], 1]`` for ``2 * n + 1``.

This is the only conversion of sympy's expressions of sizes. ``SizeSum.of_form`` in
``types/sizes.py`` computes with the data.

Private names used here (torch 2.11 to 2.13): ``SymInt.node.expr`` is the sympy expression of a
size; the classes in it, some of them torch's own (``FloorDiv``), are recognized by their names.
"""

from __future__ import annotations

import functools
import math
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
# Limits on a form from a file: sympy takes minutes to simplify larger ones.
_MOST_TERMS = 256
_MOST_DIVISIONS = 4  # by an expression that is not a number
_DEEPEST = 32  # nested divisions, minima and maxima


def symbol_of(size: Any) -> Any:
    """Return the symbol that a size or another number consists of, or None."""
    expr = size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else None
    return expr if expr is not None and expr.is_symbol else None


def step_of(size: Any) -> tuple[Any, int] | None:
    """Return the symbol that a size is a multiple of, with the factor, or None."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else None
    if expr is None or not expr.is_Mul or len(expr.args) != 2:
        return None
    number, symbol = expr.args
    return (symbol, int(number)) if number.is_Integer and symbol.is_symbol else None


def form_of_size(size: Any, names: Mapping[Any, Any]) -> Any:
    """Return a size as plain data: a number, a name, or a list of an operator and its operands.

    Args:
        size: an int or a symbolic number.
        names: the name, or the form, of each symbol.

    Returns:
        The form, or None if the size contains anything else.
    """
    if isinstance(size, torch.SymBool | torch.SymFloat):  # a number that is not a size
        symbol = symbol_of(size)
        return None if symbol is None else names.get(symbol)
    form = form_of_expr(size.node.expr, names) if isinstance(size, torch.SymInt) else int(size)
    return form if is_small(form) else None


def is_small(form: Any) -> bool:
    """True if the size of a form can be computed quickly."""
    terms, divisions, depth = _extent(form)
    return terms <= _MOST_TERMS and divisions <= _MOST_DIVISIONS and depth <= _DEEPEST


def _extent(form: Any) -> tuple[int, int, int]:
    """Return a form's number of expanded terms, of divisions by sizes, and nesting depth."""
    if not isinstance(form, list) or len(form) < 2:
        return 1, 0, 0
    kind, *parts = form
    found = [_extent(part) for part in parts]
    terms, depth = [each[0] for each in found], max(each[2] for each in found)
    divisions = sum(each[1] for each in found)
    if kind == "+":
        return sum(terms), divisions, depth
    if kind == "*":
        return min(math.prod(terms), _MOST_TERMS + 1), divisions, depth
    by_size = kind in ("//", "%") and not isinstance(parts[-1], int)
    return max(terms), divisions + by_size, depth + 1


def form_of_expr(expr: Any, names: Mapping[Any, Any]) -> Any:
    """Return an expression of sympy's as plain data, see `form_of_size`."""
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
    forms = [form_of_expr(part, names) for part in parts]
    return None if kind not in _OPERATORS or None in forms else [_OPERATORS[kind], *forms]


def size_of_form(form: Any, sizes: Mapping[str, Any]) -> Any:
    """Return the size of a form, given the sizes of the names.

    Raises:
        ValueError: the data is not a form.
    """
    if type(form) is int:
        return form
    if type(form) is str:
        return _named(form, sizes)
    if not isinstance(form, Sequence) or not form or form[0] not in OPERATORS:
        raise ValueError(f"{form!r} is not a size")
    count, call = _CALLED[form[0]]
    if len(form) < 3 or (count is not None and len(form) != count + 1):
        raise ValueError(f"{form[0]!r} of {len(form) - 1} is not a size")
    return functools.reduce(call, (size_of_form(part, sizes) for part in form[1:]))


def _named(name: str, sizes: Mapping[str, Any]) -> Any:
    if name not in sizes:
        raise ValueError(f"there is no dim {name[:40]!r}")
    return sizes[name]
