"""Questions about symbolic sizes that decide nothing: answered for those of the call, and listed.

Private names used here (torch 2.11 to 2.13): of ShapeEnv ``evaluate_expr``, which answers what is
asked of sizes, ``suppress_guards``, and ``_log_guard``, which is told of each answer that does not
follow from the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


def unasked(fake: FakeTensorMode) -> AbstractContextManager[Any]:
    """A block whose questions decide nothing: what is only a view of what is known asks them."""
    return nullcontext() if fake.shape_env is None else set_aside(fake.shape_env)


@contextmanager
def set_aside(env: Any) -> Iterator[list[Any]]:
    """What is asked of the sizes in the block is answered for those of the trace, and listed."""
    asked: list[Any] = []
    answered: set[Any] = env.__dict__.setdefault("tsfunc_answered", set())
    evaluate = env.evaluate_expr
    asking: list[Any] = []

    def evaluate_expr(expr: Any, *args: Any, **kwargs: Any) -> Any:
        asking.append(expr)
        try:
            with env.suppress_guards():
                found = evaluate(expr, *args, **kwargs)
        finally:
            asking.pop()
        if expr in answered:
            asked.append(expr)
        return found

    def log_guard(*args: Any, **kwargs: Any) -> None:
        # It is called for what does not follow from the bounds, once for each question.
        if asking:
            answered.add(asking[-1])

    env.evaluate_expr, env._log_guard = evaluate_expr, log_guard
    try:
        yield asked
    finally:
        del env.evaluate_expr, env._log_guard
