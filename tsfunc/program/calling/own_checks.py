"""Checks of data that the function's own code makes: its own error says what is wrong.

NOTE [own errors]
A program checks in the place of ``if (x < 0).any(): raise ValueError(...)``, and does not know what
the function raises (NOTE [checks of arguments] in ``dispatch/refusals.py``). Where such a check
fails, the function itself is called with the arguments of the call, and comes to its ``raise``. It
is not where anything has been written before: into an argument, for one, which the function would
write into again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tsfunc.dispatch import current_levels
from tsfunc.program.graphs.program import Program
from tsfunc.program.passes.effects import writes


def raise_own(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    program: Program,
    error: RuntimeError,
) -> None:
    """Raises what a function raises where a check of its own fails in its program.

    Args:
        func: the function.
        args, kwargs: what it is called with.
        program: what has run.
        error: what that has raised; where it is of another kind nothing happens.
    """
    if current_levels() or not _is_own(program, str(error)):
        return
    try:
        func(*args, **kwargs)
    except Exception as own:
        raise own from None


def _is_own(program: Program, message: str) -> bool:
    """Whether a message is that of a check of the function's, before which nothing is written."""
    for node in program.graph.nodes:
        if writes(node):
            return False
        if node.meta.get("own_check") is not None and node.meta["own_check"] in message:
            return True
    return False
