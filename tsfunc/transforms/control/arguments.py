"""How control flow's arguments are given: JAX's order, and torch's tuples of operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

Batching = Literal["lanes", "select"]


def check_batching(what: str, batching: str) -> None:
    """Refuses what is no way to run branches under vmap."""
    if batching not in get_args(Batching):
        raise ValueError(f'{what}: batching must be "lanes" or "select", got {batching!r}.')


def operands_of(operands: tuple[Any, ...], func: Callable[..., Any]) -> tuple[Any, ...]:
    """The operands, unpacked where they were given in one tuple or list, as torch takes them."""
    if len(operands) == 1 and type(operands[0]) in (tuple, list):
        given = tuple(operands[0])
        if takes(func, len(given)):
            return given
    return operands


def takes(func: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with that many positional arguments."""
    try:
        inspect.signature(func).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # no signature: a function of C++
        return count == 1
    return True


def takes_entries(func: Callable[..., Any], carry: Any) -> bool:
    """Whether a carry's entries are the function's arguments, as torch has it."""
    return type(carry) in (tuple, list) and bool(carry) and takes(func, len(carry))
