"""Constraints on named sizes as text: the conditions in a file, and their code as guards."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping

from tsfunc.errors import DescriptorError
from tsfunc.types.sizes import HIGHEST_POWER

_LONGEST = 2000  # characters
_LARGEST_NUMBER = 1 << 63
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FUNCTIONS = frozenset({
    "min", "max", "abs", "int", "float", "round", "math.floor", "math.ceil", "math.trunc",
    "math.sqrt", "math.cos", "math.cosh", "math.sin", "math.sinh", "math.tan", "math.tanh",
    "math.acos", "math.asin", "math.atan", "math.exp", "math.log", "math.log2",
})  # fmt: skip


def constraint_code(text: str, variables: Mapping[str, str]) -> str:
    """Return a constraint on named sizes as Python code that needs ``math`` in its scope.

    A file stores the conditions of a program on named sizes as such constraints.

    Args:
        text: comparisons joined by ``and``, ``or`` and ``not``. The comparisons are of sums,
            products, quotients and remainders of names and numbers, and calls of ``min``, ``max``,
            ``abs``, ``round``, ``int``, ``float`` and some functions of ``math``.
        variables: name to its variable in the code.

    Raises:
        DescriptorError: the text is not such a constraint, or has a name that is not in
        ``variables``.

    Example:
        >>> constraint_code("n % 2 == 0 and n > m", {"n": "size_n", "m": "size_m"})
        'size_n % 2 == 0 and size_n > size_m'
    """
    if len(text) > _LONGEST:
        raise DescriptorError(
            f"{text[:20]!r}...: expected a condition of at most {_LONGEST} characters, "
            f"got {len(text)}"
        )
    try:
        return ast.unparse(_constraint(ast.parse(text, mode="eval").body, variables))
    except DescriptorError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DescriptorError(
            f"expected a condition on sizes, such as 'n >= 2', got {text[:200]!r}"
        ) from None


def _constraint(node: ast.expr, variables: Mapping[str, str]) -> ast.expr:
    match node:
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(op, [_constraint(value, variables) for value in values])
        case ast.UnaryOp(op=ast.Not() as op, operand=operand):
            return ast.UnaryOp(op, _constraint(operand, variables))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, _COMPARISONS):
            return ast.Compare(_number(left, variables), [op], [_number(right, variables)])
        case _:
            raise DescriptorError(f"expected a comparison of sizes, got {ast.unparse(node)!r}")


def _number(node: ast.expr, variables: Mapping[str, str]) -> ast.expr:
    match node:
        case ast.Constant(value=value) if _is_plain(value):
            return ast.Constant(value)
        case ast.Name(id=name) if name in variables:
            return ast.parse(variables[name], mode="eval").body
        case ast.UnaryOp(op=ast.USub() as op, operand=operand):
            return ast.UnaryOp(op, _number(operand, variables))
        case ast.BinOp(left=base, op=ast.Pow() as op, right=power) if _is_power(power):
            return ast.BinOp(_number(base, variables), op, power)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
            return ast.BinOp(_number(left, variables), op, _number(right, variables))
        case ast.Call(func=func, args=args, keywords=[]) if ast.unparse(func) in _FUNCTIONS:
            return ast.Call(func, [_number(arg, variables) for arg in args], [])
        case _:
            raise DescriptorError(f"{ast.unparse(node)!r} is not made of sizes")


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER


def _is_power(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    value = node.value if isinstance(node, ast.Constant) else None
    return _is_plain(value) and isinstance(value, int | float) and value <= HIGHEST_POWER
