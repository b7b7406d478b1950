"""Errors of the function's own checks of data, raised if a check fails in its program.

NOTE [user assertions]
For ``if (x < 0).any(): raise ValueError(...)`` and for
``torch._check(x.nonzero().shape[0] > 2, lambda: "...")`` a program has a check without the
exception or the message (NOTE [checks of arguments] in ``dispatch/user_checks``). If such a check
fails, the function itself is called with the arguments of the call. A test of a tensor raises the
function's exception; a check of a size of data stays a ``FailedCheckError``, with the function's
message added. The function is not called if the program has written into an argument, or another
value from outside, before the check, since the function would write again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tsfunc.bridge.control.node_writes import written_arguments
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.errors import FailedCheckError
from tsfunc.program.passes.effects import Aliases
from tsfunc.program.program import Program

_FAILED_ASSERTION = "Expected Tensor with single nonzero value"  # torch's, without a message


def raise_user_assertion(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    program: Program,
    error: RuntimeError,
) -> None:
    """Raise the function's own error if one of its checks fails in its program.

    Args:
        program: the program that has run.
        error: the error of the program; an error of another kind is ignored.

    Raises:
        FailedCheckError: a check of a size of data failed, and the function gives the reason.
    """
    if current_trace() is not None or not _is_user_check(program, str(error)):
        return
    try:
        func(*args, **kwargs)
    except Exception as own:
        if not isinstance(error, FailedCheckError):
            raise own from None
        failed = FailedCheckError(f"{error}\n{type(own).__name__}: {own}")
        raise failed.with_traceback(own.__traceback__) from None


def _is_user_check(program: Program, message: str) -> bool:
    """True if a check of the function has the message, and no value from outside is written before.

    The function writes into the tensors that it makes itself again.
    """
    aliases = Aliases(program.graph)
    for node in program.graph.nodes:
        if any(map(aliases.is_from_outside, written_arguments(node))):
            return False
        op = node.meta.get("op")
        if "engine_check" in node.meta:
            continue
        if op is not None and op.name == "aten::_assert_async":
            check: Any = _FAILED_ASSERTION
        elif node.target is check_size or (op is not None and op.name == "aten::_assert_async.msg"):
            check = node.args[1]
        else:
            continue
        if isinstance(check, str) and check in message:
            return True
    return False
