"""Expressions over sizes as Python code, for people and for guards.

Private names used here (torch 2.11 to 2.13): ``torch.utils._sympy`` has the functions in
ShapeEnv's expressions, and ``PythonPrinter``, which prints them. These modules import sympy, which
takes half a second, so this file imports them when an expression is first printed.
"""

from __future__ import annotations

import functools
import re
from typing import Any


def python_text(expr: Any) -> str:
    """Return an expression as text for people."""
    from sympy import And, Float, Function, Not, Or
    from sympy.core.relational import Relational
    from torch.utils._sympy.functions import Max, Min

    if isinstance(expr, Relational):
        return f"{python_text(expr.lhs)} {expr.rel_op} {python_text(expr.rhs)}"
    if isinstance(expr, Not):
        return f"not {python_text(expr.args[0])}"
    if isinstance(expr, And | Or):
        word = " and " if isinstance(expr, And) else " or "
        return word.join(sorted(map(python_text, expr.args)))
    # sympy's own text of functions is not Python.
    known = expr.has(Function, Max, Min, Float)
    return str(_printer_for_people()().doprint(expr)) if known else str(expr)


def code_text(expr: Any) -> str:
    """Return an expression as executable Python, which may use the module ``math``."""
    return str(_printer()().doprint(expr))


@functools.cache
def _printer() -> Any:
    from torch.utils._sympy.printers import PythonPrinter

    base: Any = PythonPrinter

    class Printer(base):  # type: ignore[misc]
        """A printer of Python's own functions instead of torch's symbolic ones."""

        def _print_ToFloat(self, expr: Any) -> str:
            return f"float({self.stringify(expr.args, '', 0)})"

        def _print_TruncToInt(self, expr: Any) -> str:
            return f"int({self.stringify(expr.args, '', 0)})"

        def _print_Float(self, expr: Any) -> str:
            return repr(float(expr))

        def _helper_sqrt(self, expr: Any) -> str:
            return f"math.sqrt({self.stringify([expr], '', 0)})"

    return Printer


@functools.cache
def _printer_for_people() -> Any:
    from sympy.printing.precedence import PRECEDENCE

    base: Any = _printer()

    class DisplayPrinter(base):  # type: ignore[misc]
        """A printer of sums in the usual order, and of differences with a minus sign."""

        def _print_Add(self, expr: Any) -> str:
            level = PRECEDENCE["Add"]
            terms = [self.parenthesize(x, level, strict=True) for x in expr.as_ordered_terms()]
            return " + ".join(terms).replace(" + -", " - ")

        def _print_Mul(self, expr: Any) -> str:
            if expr.as_coeff_Mul()[0] < 0:
                return f"-{self.parenthesize(-expr, PRECEDENCE['Mul'], strict=True)}"
            return str(super()._print_Mul(expr))

    return DisplayPrinter


def moduli(expr: Any) -> list[int]:
    """Return the numbers by which an expression takes the remainder of a symbol."""
    from torch.utils._sympy.functions import Mod

    pairs = [each.args for each in expr.atoms(Mod)]
    return [int(by) for value, by in pairs if value.is_Symbol and by.is_number]


def has_name(text: str, symbol: Any) -> bool:
    """True if a text contains a symbol's name; a name of over 2 letters may be part of a word."""
    name = str(symbol)
    return bool(re.search(rf"{name}(?!\d)" if len(name) > 2 else rf"\b{name}\b", text))


def divisions(expr: Any) -> list[tuple[str, int]]:
    """Return the symbols that an expression divides by a number above 1, with that number."""
    from torch.utils._sympy.functions import FloorDiv, Mod

    pairs = [each.args for each in expr.atoms(FloorDiv, Mod)]
    found = {(str(value), int(by)) for value, by in pairs if value.is_Symbol and by.is_Integer}
    return sorted(pair for pair in found if pair[1] > 1)


def exact(expr: Any) -> Any:
    """Return an expression with ints in place of whole float factors of sizes.

    ``int(2.0 * float(n))`` is ``2 * n`` for all sizes, because floats are exact up to 2 ** 53.
    """
    from torch.utils._sympy.functions import ToFloat, TruncToInt

    def whole(inner: Any) -> Any:
        factor, rest = inner.as_coeff_Mul()
        if isinstance(rest, ToFloat) and float(factor).is_integer():
            return int(factor) * rest.args[0]
        return TruncToInt(inner)

    return expr.replace(TruncToInt, whole)
