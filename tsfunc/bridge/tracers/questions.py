"""Questions about symbolic sizes that are not to decide anything.

What is asked of a named dim restricts a trace to the sizes that have the same answer. But a tracer
is made of what is known already: torch looks, as it makes one, whether it is contiguous, or empty,
and whatever it finds changes nothing of the program.

Private names used here (torch 2.11 to 2.13): ``SymInt.node`` with its ``shape_env``; of ShapeEnv
``evaluate_expr``, which answers what is asked of sizes, ``suppress_guards``, and ``_log_guard``,
which is told of each answer that does not follow from the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def environment_of(shape: Sequence[Any]) -> Any:
    """The environment of the symbols in a shape; None where it is of numbers alone."""
    for size in shape:
        if type(size) is torch.SymInt:
            return getattr(size.node, "shape_env", None)
    return None


def unasked(fake: FakeTensorMode) -> AbstractContextManager[Any]:
    """A block whose questions decide nothing: what is only a view of what is known asks them."""
    return nullcontext() if fake.shape_env is None else set_aside(fake.shape_env)


def unasked_of(shape: Sequence[Any]) -> AbstractContextManager[Any]:
    """The same for questions about one shape."""
    env = environment_of(shape)
    return nullcontext() if env is None else set_aside(env)


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

    outer = {name: env.__dict__.get(name) for name in ("evaluate_expr", "_log_guard")}
    env.evaluate_expr, env._log_guard = evaluate_expr, log_guard
    try:
        yield asked
    finally:
        for name, before in outer.items():
            delattr(env, name) if before is None else setattr(env, name, before)
