"""Symbolic sizes and numbers without guards: their kind, their text, and known equality.

No function here asks a size for its value, because that would add a guard to the trace.

Private names used here (torch 2.11 to 2.13): ``SymInt.node`` with its ``expr`` and ``shape_env``;
``statically_known_true`` tells whether a fact follows from the bounds of the symbols.
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
    """Return a size as text: a number, or an expression in the user's names."""
    if isinstance(size, int):
        return str(size)
    text: str = size.node.shape_env.symbols.spell_size(size)
    return text


def same_size(left: Any, right: Any) -> bool:
    """True if two sizes are known to be equal; adds no guard."""
    return bool(_expression(left) == _expression(right))


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def same_number(left: Any, right: Any) -> bool:
    """True if two numbers have one kind and are known to be equal; adds no guard."""
    if type(left) is not type(right):
        return False
    symbolic = type(left) in KINDS
    return bool(left.node.expr == right.node.expr if symbolic else left == right)


def known_to_hold(fact: Any) -> bool:
    """True if a fact about sizes is known to hold for all sizes; adds no guard."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)


def kind_of(value: Any) -> type:
    """Return the kind of a plain or symbolic number: bool, int, float or complex."""
    for kind in (bool, int, float, complex):
        if isinstance(value, kind) or KINDS.get(type(value)) is kind:
            return kind
    raise TypeError(f"{type(value).__name__} is not a kind of number")


def symbols_in(results: Sequence[Any], fresh: Sequence[Any]) -> list[tuple[Any, int, int | None]]:
    """Find the fresh symbols in the results of an operator.

    Returns:
        For each occurrence the symbol, the index of the result, and the dim with that size, or
        None if the result is the number itself.
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
