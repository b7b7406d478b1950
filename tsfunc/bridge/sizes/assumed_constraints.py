"""Assumes constraints on named sizes, given as text, in the environment of their symbols.

A trace adds constraints to its environment as guards. The environment of a program that was read
from a
file has no guards: this module adds those of the file before results are computed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.expressions import is_small, size_of_form

_ARITHMETIC: dict[type, str] = {ast.Add: "+", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_LARGEST_POWER = 8


class _NotASize(Exception):
    """A constraint that cannot be added to the environment."""


def assume(constraints: Sequence[str], sizes: Mapping[str, Any]) -> None:
    """Assume constraints on symbols.

    Args:
        constraints: comparisons of sizes, joined by ``and``, ``or`` and ``not``. A constraint is
            ignored if it is too large to evaluate quickly, or contains numbers other than integers.
        sizes: the symbolic sizes, and numbers, by name.
    """
    for constraint in constraints:
        try:
            holds = _constraint(ast.parse(constraint, mode="eval").body, sizes)
        except (_NotASize, SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError):
            continue
        if isinstance(holds, torch.SymBool) and holds.node.hint:
            bool(holds)  # the environment relies on a condition that was true


def _constraint(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=[first, *others]):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            joined = _constraint(first, sizes)
            for other in others:
                joined = join(joined, _constraint(other, sizes))
            return joined
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return torch.sym_not(_constraint(operand, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)](_size_of_node(left, sizes), _size_of_node(right, sizes))
        case _:
            raise _NotASize


def _size_of_node(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    form = _form(node)
    if not is_small(form):
        raise _NotASize
    return size_of_form(form, sizes)


def _form(node: ast.expr) -> Any:
    """Return a size as plain data, see ``expressions``; raise _NotASize if it has none."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ["*", -1, _form(operand)]
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return ["+", _form(left), ["*", -1, _form(right)]]
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int() as power)) if (
            2 <= power <= _LARGEST_POWER
        ):
            return ["*", *[_form(base)] * power]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return [_ARITHMETIC[type(op)], _form(left), _form(right)]
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as args):
            return [name, *map(_form, args)]
        case _:
            raise _NotASize
