"""Expressions over sizes as Python: for people, and for guards.

Private names used here (torch 2.11 to 2.13): ``torch.utils._sympy`` has the functions that the
expressions of ShapeEnv are made of, and ``PythonPrinter``, which spells them. They import sympy,
which takes half a second, so this file imports them where something is first spelled.
"""

from __future__ import annotations

import functools
import re
from typing import Any


def python_text(expr: Any) -> str:
    """An expression for people."""
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
    # sympy's own text is no Python where there are functions.
    known = expr.has(Function, Max, Min, Float)
    return str(_printer_for_people()().doprint(expr)) if known else str(expr)


def code_text(expr: Any) -> str:
    """An expression as Python that can run: of its functions ``math`` must be known."""
    return str(_printer()().doprint(expr))


@functools.cache
def _printer() -> Any:
    from torch.utils._sympy.printers import PythonPrinter

    base: Any = PythonPrinter

    class Printer(base):  # type: ignore[misc]
        """Python's own functions in the place of torch's for symbolic numbers."""

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

    class Printer(base):  # type: ignore[misc]
        """Sums in the usual order, and differences as such."""

        def _print_Add(self, expr: Any) -> str:
            level = PRECEDENCE["Add"]
            terms = [self.parenthesize(x, level, strict=True) for x in expr.as_ordered_terms()]
            return " + ".join(terms).replace(" + -", " - ")

        def _print_Mul(self, expr: Any) -> str:
            if expr.as_coeff_Mul()[0] < 0:
                return f"-{self.parenthesize(-expr, PRECEDENCE['Mul'], strict=True)}"
            return str(super()._print_Mul(expr))

    return Printer


def moduli(expr: Any) -> list[int]:
    """The numbers by which an expression divides a symbol, to look at the remainder."""
    from torch.utils._sympy.functions import Mod

    pairs = [each.args for each in expr.atoms(Mod)]
    return [int(by) for value, by in pairs if value.is_Symbol and by.is_number]


def has_name(text: str, symbol: Any) -> bool:
    """Whether a text has the name of a symbol, as a part of a word too if the name is long."""
    name = str(symbol)
    return bool(re.search(rf"{name}(?!\d)" if len(name) > 2 else rf"\b{name}\b", text))


def divisions(expr: Any) -> list[tuple[str, int]]:
    """The symbols that an expression divides by a number, with that number."""
    from torch.utils._sympy.functions import FloorDiv, Mod

    pairs = [each.args for each in expr.atoms(FloorDiv, Mod)]
    found = {(str(value), int(by)) for value, by in pairs if value.is_Symbol and by.is_Integer}
    return sorted(pair for pair in found if pair[1] > 1)


def exact(expr: Any) -> Any:
    """An expression with whole numbers where a float that is whole multiplies a size.

    ``int(2.0 * float(n))`` is ``2 * n`` for all sizes: floats have whole numbers up to 2 ** 53.
    """
    from torch.utils._sympy.functions import ToFloat, TruncToInt

    def whole(inner: Any) -> Any:
        factor, rest = inner.as_coeff_Mul()
        if isinstance(rest, ToFloat) and float(factor).is_integer():
            return int(factor) * rest.args[0]
        return TruncToInt(inner)

    return expr.replace(TruncToInt, whole)
