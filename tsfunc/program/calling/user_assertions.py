"""Errors of the function's own checks of data, raised if the check fails in its program.

NOTE [user assertions]
For ``if (x < 0).any(): raise ValueError(...)`` and for
``torch._check(x.nonzero().shape[0] > 2, lambda: "...")`` a program has a check without the
exception or the message (NOTE [checks of arguments] in ``dispatch/refusals.py``). If such a check
fails, the function itself is called with the arguments of the call. A test of a tensor raises the
function's exception; a check of a size of data stays a `FailedCheckError`, with the function's
message added. The function is not called if the program has written before the check, for example
into an argument, since the function would write again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.dispatch import current_levels
from tsfunc.errors import FailedCheckError
from tsfunc.program.graphs.program import Program
from tsfunc.program.passes.effects import writes


def raise_user_assertion(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    program: Program,
    error: RuntimeError,
) -> None:
    """Raise the function's own error if one of its checks fails in its program.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        program: the program that has run.
        error: the error of the program; an error of another kind is ignored.

    Raises:
        FailedCheckError: a check of a size of data failed, and the function gives the reason.
    """
    if current_levels() or not _is_own(program, str(error)):
        return
    try:
        func(*args, **kwargs)
    except Exception as own:
        if not isinstance(error, FailedCheckError):
            raise own from None
        raise FailedCheckError(f"{error}\n{type(own).__name__}: {own}") from own


def _is_own(program: Program, message: str) -> bool:
    """Return True if a check of the function has the message, and nothing is written before it."""
    for node in program.graph.nodes:
        if writes(node):
            return False
        check = node.args[1] if node.target is check_size else node.meta.get("own_check")
        if isinstance(check, str) and check in message:
            return True
    return False
