"""The edge to sympy: expressions of ShapeEnv as plain data and back, as text, as code and as nodes.

This file has all conversions of sympy's expressions of sizes. The plain data of ``2 * n + 1`` is
``["+", ["*", 2, "n"], 1]``, and ``fold_form`` in ``types/sizes.py`` computes with it.

The classes in an expression of ShapeEnv, some of them torch's own (``FloorDiv``), are recognized by
their names. torch's modules of these classes import sympy, which takes half a second, so this file
imports them when an expression is first printed or recorded.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.fx

from tsfunc.types.sizes import fold_form

# --- plain data


_OPERATORS = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%",
    "Max": "max", "Min": "min",
}  # fmt: skip
_SIZE_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
}
OPERATORS = frozenset(_SIZE_OPERATORS)
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
    extents = [_extent(part) for part in parts]
    terms, depth = [extent[0] for extent in extents], max(extent[2] for extent in extents)
    divisions = sum(extent[1] for extent in extents)
    if kind == "+":
        return sum(terms), divisions, depth
    if kind == "*":
        return min(math.prod(terms), _MOST_TERMS + 1), divisions, depth
    by_size = kind in ("//", "%") and not isinstance(parts[-1], int)
    return max(terms), divisions + by_size, depth + 1


def form_of_expr(expr: Any, names: Mapping[Any, Any]) -> Any:
    """Return an expression of sympy's as plain data, see ``form_of_size``."""
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

    def size_of(leaf: int | str) -> Any:
        if isinstance(leaf, int):
            return leaf
        if leaf not in sizes:
            raise ValueError(f"expected the name of a dim, got {leaf[:40]!r}")
        return sizes[leaf]

    return fold_form(form, size_of, _SIZE_OPERATORS)


# --- text for people, and code


FUNCTIONS_OF_MATH: Final[Mapping[str, Callable[..., float]]] = {
    name: getattr(math, name)
    for name in (
        "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan", "exp", "log",
        "log2",
    )
}  # fmt: skip
"""The functions of ``math`` that expressions have, by name."""
RECORDED_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    name: getattr(torch, f"_sym_{name}", function) for name, function in FUNCTIONS_OF_MATH.items()
}
"""The functions in their places in graphs, which take symbolic numbers in torch's own traces."""


def python_text(expr: Any) -> str:
    """Return an expression as text for people: as in ``code_text``, with fewer parentheses."""
    from sympy import And, Not, Or
    from sympy.core.relational import Relational

    if isinstance(expr, Relational):
        return f"{python_text(expr.lhs)} {expr.rel_op} {python_text(expr.rhs)}"
    if isinstance(expr, Not):
        return f"not {python_text(expr.args[0])}"
    if isinstance(expr, And | Or):
        word = " and " if isinstance(expr, And) else " or "
        return word.join(sorted(map(python_text, expr.args)))
    return code_text(expr)


def code_text(expr: Any) -> str:
    """Return an expression as executable Python, which may use the module ``math``."""
    return str(_printer()().doprint(expr))


@functools.cache
def _printer() -> Any:
    from sympy.printing.str import StrPrinter
    from torch.utils._sympy.printers import PythonPrinter

    base: Any = PythonPrinter

    class Printer(base):  # type: ignore[misc]
        """A printer of Python's own functions, and of sympy's text of sums, products and powers."""

        def _print_ToFloat(self, expr: Any) -> str:
            return f"float({self.stringify(expr.args, '', 0)})"

        def _print_TruncToInt(self, expr: Any) -> str:
            return f"int({self.stringify(expr.args, '', 0)})"

        def _print_Float(self, expr: Any) -> str:
            return repr(float(expr))

        def _helper_sqrt(self, expr: Any) -> str:
            return f"math.sqrt({self.stringify([expr], '', 0)})"

    def function_of_math(name: str, printer: Any, expr: Any) -> str:
        return f"math.{name}({printer.stringify(expr.args, '', 0)})"

    for name in FUNCTIONS_OF_MATH:
        method = functools.partialmethod(functools.partial(function_of_math, name))
        setattr(Printer, f"_print_OpaqueUnaryFn_{name}", method)
    for kind in ("Add", "Mul", "Pow"):
        setattr(Printer, f"_print_{kind}", getattr(StrPrinter, f"_print_{kind}"))
    return Printer


def moduli(expr: Any) -> list[int]:
    """Return the numbers by which an expression takes the remainder of a symbol."""
    from torch.utils._sympy.functions import Mod

    pairs = [remainder.args for remainder in expr.atoms(Mod)]
    return [int(by) for value, by in pairs if value.is_Symbol and by.is_number]


def has_name(text: str, symbol: Any) -> bool:
    """True if a text contains a symbol's name; a name of over 2 letters may be part of a word."""
    name = str(symbol)
    return bool(re.search(rf"{name}(?!\d)" if len(name) > 2 else rf"\b{name}\b", text))


def divisions(expr: Any) -> list[tuple[str, int]]:
    """Return the symbols that an expression divides by a number above 1, with that number."""
    from torch.utils._sympy.functions import FloorDiv, Mod

    pairs = [quotient.args for quotient in expr.atoms(FloorDiv, Mod)]
    divided = {(str(value), int(by)) for value, by in pairs if value.is_Symbol and by.is_Integer}
    return sorted(pair for pair in divided if pair[1] > 1)


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


# --- nodes of a graph


def number_node(graph: torch.fx.Graph, values: Mapping[Any, torch.fx.Node], expr: Any) -> Any:
    """Return the node that computes an expression.

    Args:
        expr: a sympy expression of ShapeEnv.
    """
    from torch.utils._sympy.interp import sympy_interp

    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in values.items()}
    with torch._C._EnableTorchFunction():  # even if an operator's rule reads the node
        return sympy_interp(_number_recorder(), proxies, expr).node


@functools.cache
def _number_recorder() -> Any:
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    base: Any = PythonReferenceAnalysis

    class NumberRecorder(base):  # type: ignore[misc]
        """Python's operators and functions, recorded on the values of the graph."""

        int_truediv = staticmethod(operator.truediv)

        @staticmethod
        def floor_to_int(x: Any, dtype: Any) -> Any:
            return _record_call(math.floor, x)

        @staticmethod
        def ceil_to_int(x: Any, dtype: Any) -> Any:
            return _record_call(math.ceil, x)

        @staticmethod
        def trunc_to_int(x: Any, dtype: Any) -> Any:
            return _record_call(math.trunc, x)

        @staticmethod
        def round_to_int(x: Any, dtype: Any) -> Any:
            return _record_call(round, x)

        @staticmethod
        def round_decimal(x: Any, digits: int) -> Any:
            return _record_call(round, x, digits)

        @staticmethod
        def floor(x: Any) -> Any:
            return torch.sym_float(_record_call(math.floor, x))

        @staticmethod
        def ceil(x: Any) -> Any:
            return torch.sym_float(_record_call(math.ceil, x))

        @staticmethod
        def trunc(x: Any) -> Any:
            return torch.sym_float(_record_call(math.trunc, x))

    for name, function in RECORDED_FUNCTIONS.items():
        setattr(NumberRecorder, name, staticmethod(functools.partial(_record_call, function)))
    return NumberRecorder


def _record_call(function: Callable[..., Any], x: Any, *rest: Any) -> Any:
    """Record a function that needs a Python number; a node has no such number yet."""
    if isinstance(x, torch.fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *rest), {})
    return function(x, *rest)
