"""What is known to hold of named sizes, as text, told to the environment of their symbols.

A trace tells its environment by asking. The symbols of a program that was read from a file have
been asked nothing: what its calls are held to is told them before results are worked out.

Private names used here (torch 2.11 to 2.13): ``SymBool.node`` with its ``hint``, which is what the
sizes of the call answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.size_forms import is_small, size_of_form

_ARITHMETIC: dict[type, str] = {ast.Add: "+", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_LARGEST_POWER = 8


class _Untold(Exception):
    """A fact that the environment is not told."""


def assume(facts: Sequence[str], sizes: Mapping[str, Any]) -> None:
    """Has symbols rely on facts.

    Args:
        facts: comparisons of sizes, joined by ``and``, ``or`` and ``not``. Those that are too large
            to be worked out at once, or of other numbers than integers, are left out.
        sizes: the symbolic sizes, and numbers, by their names.
    """
    for fact in facts:
        try:
            holds = _fact(ast.parse(fact, mode="eval").body, sizes)
        except (_Untold, SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError):
            continue
        if isinstance(holds, torch.SymBool) and holds.node.hint:
            bool(holds)  # what is asked and answered with yes is relied on


def _fact(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=[first, *others]):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            found = _fact(first, sizes)
            for each in others:
                found = join(found, _fact(each, sizes))
            return found
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return torch.sym_not(_fact(operand, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)](_size(left, sizes), _size(right, sizes))
        case _:
            raise _Untold


def _size(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    form = _form(node)
    if not is_small(form):
        raise _Untold
    return size_of_form(form, sizes)


def _form(node: ast.expr) -> Any:
    """A size as plain data, see ``size_forms``."""
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
            raise _Untold
