"""Questions about symbolic sizes that add no guards.

A question about a named dim restricts a trace to sizes with the same answer. But a tracer only
repeats known metadata: when torch makes it, torch asks whether it is contiguous or empty, and the
answers change nothing in the program.

Private names used here (torch 2.11 to 2.13): ``SymInt.node`` with its ``shape_env``; of ShapeEnv
``evaluate_expr``, which answers questions about sizes, ``suppress_guards``, and ``_log_guard``,
which receives each answer that does not follow from the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def environment_of(shape: Sequence[Any]) -> Any:
    """Return the environment of the symbols in a shape; None without symbols."""
    for size in shape:
        if type(size) is torch.SymInt:
            return getattr(size.node, "shape_env", None)
    return None


def suppress_guards(fake: FakeTensorMode) -> AbstractContextManager[Any]:
    """Suppress the guards of a block that only makes views of known tensors."""
    return nullcontext() if fake.shape_env is None else defer_guards(fake.shape_env)


def suppress_guards_of(shape: Sequence[Any]) -> AbstractContextManager[Any]:
    """Do the same for questions about one shape."""
    env = environment_of(shape)
    return nullcontext() if env is None else defer_guards(env)


@contextmanager
def defer_guards(env: Any) -> Iterator[list[Any]]:
    """Answer a block's questions about sizes with the hints, without guards, and list them."""
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
        # ShapeEnv calls this once for each question that does not follow from the bounds.
        if asking:
            answered.add(asking[-1])

    outer = {name: env.__dict__.get(name) for name in ("evaluate_expr", "_log_guard")}
    env.evaluate_expr, env._log_guard = evaluate_expr, log_guard
    try:
        yield asked
    finally:
        for name, before in outer.items():
            delattr(env, name) if before is None else setattr(env, name, before)
