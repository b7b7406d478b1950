"""Side by side with torch.compile: Dynamo breaks its graph at a transform, and stays outside.

What runs inside of a transform are tracers, which Dynamo knows nothing of. So the functions that
enter one are marked: not to be traced, and neither what they call. It costs a call nothing.

NOTE [inside of torch.compile]
A call of a specialized function is traced by Dynamo as a call of the function itself: Dynamo makes
a graph and guards of its own, so nothing is gained by a program in between, and the graph need not
break. Where the function calls a transform it does break, before the call, and the program runs.

Private names used here (torch 2.11 to 2.13): ``_C._dynamo.eval_frame.set_code_exec_strategy``
says what Dynamo does with frames of a code object, and with frames below them;
``_torchdynamo_disable`` on a function keeps it from tracing calls of it; one that is its
``_torchdynamo_inline`` is traced in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_skip: Any = eval_frame._FrameAction.SKIP
_SKIP_ALL = eval_frame._FrameExecStrategy(_skip, _skip)


def outside_dynamo(func: F) -> F:
    """Marks a function that Dynamo does not trace, neither itself nor what it calls."""
    code: Any = getattr(func, "__code__")  # noqa: B009 - no attribute of every Callable
    eval_frame.set_code_exec_strategy(code, _SKIP_ALL)
    func._torchdynamo_disable = True  # type: ignore[attr-defined]
    return func


def instead_in_dynamo(other: Callable[..., Any]) -> Callable[[F], F]:
    """Marks a function in the place of which Dynamo traces another one."""

    def mark(func: F) -> F:
        func._torchdynamo_inline = other  # type: ignore[attr-defined]
        return func

    return mark
