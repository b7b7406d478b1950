"""Symbolic sizes and numbers, as they are met: their kind and text; whether two are equal.

Nothing here asks a size for its value, which would be a guard of the trace.

Private names used here (torch 2.11 to 2.13): ``SymInt.node`` with its ``expr`` and ``shape_env``;
``statically_known_true`` says whether something follows from the bounds of the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

KINDS: dict[type, Callable[[Any], Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}


def size_text(size: Any) -> str:
    """A size as text: a number, or an expression in the user's names."""
    if isinstance(size, int):
        return str(size)
    text: str = size.node.shape_env.symbols.spell_size(size)
    return text


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal; that they are found out adds no guard."""
    return bool(_expression(left) == _expression(right))


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def same_number(left: Any, right: Any) -> bool:
    """Whether two numbers are of one kind and known to be equal, without asking for it."""
    if type(left) is not type(right):
        return False
    symbolic = type(left) in KINDS
    return bool(left.node.expr == right.node.expr if symbolic else left == right)


def known_to_hold(fact: Any) -> bool:
    """Whether a fact about sizes holds whatever they are, without asking for it."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)


def kind_of(value: Any) -> type:
    """The kind of a number: bool, int, float or complex, also of a symbolic one."""
    for kind in (bool, int, float, complex):
        if isinstance(value, kind) or KINDS.get(type(value)) is kind:
            return kind
    raise TypeError(f"{type(value).__name__} is no kind of number")


def symbols_in(results: Sequence[Any], fresh: Sequence[Any]) -> list[tuple[Any, int, int | None]]:
    """Where fresh symbols stand among the results of an operator.

    Returns:
        For each its symbol, the number of the result, and the dim whose size it is; None for
        the dim where the result is the number itself.
    """
    found: list[tuple[Any, int, int | None]] = []
    for i, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            for dim, size in enumerate(result.shape):
                if isinstance(size, torch.SymInt) and size.node.expr in fresh:
                    found.append((size.node.expr, i, dim))
        elif isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            found += [(s, i, None) for s in result.node.expr.free_symbols if s in fresh]
    return found
