"""Constraints on symbolic numbers that hold only in one part of a trace.

``torch._check(n > 3)`` in a branch is checked only if that branch is taken. Code outside of the
branch must not rely on the constraint: the condition ``n > 3`` is still unknown there.

ShapeEnv has tables of constraints by symbol (``var_to_range``, ``replacements``,
``deferred_runtime_asserts``, ``size_like``) and by expression (``axioms``, ``divisible``); its
version counters invalidate its caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def scoped_constraints(env: Any) -> Iterator[None]:
    """Forget the constraints asserted in a block after it, except on symbols made in it.

    Args:
        env: the environment of the symbols, or None if there is none yet.
    """
    if env is None:
        yield
        return
    symbols, count = frozenset(env.var_to_range), env.num_deferred_runtime_asserts
    tables = env.var_to_range, env.replacements, env.deferred_runtime_asserts
    before = [dict(table) for table in tables]
    asserted = {
        symbol: list(constraints) for symbol, constraints in env.deferred_runtime_asserts.items()
    }
    axioms, divisible, size_like = dict(env.axioms), set(env.divisible), set(env.size_like)
    try:
        yield
    finally:
        if env.num_deferred_runtime_asserts != count:
            before[2] = asserted
            for table, old in zip(tables, before, strict=True):
                for symbol in symbols & table.keys() - old.keys():
                    del table[symbol]
                table.update(old)
            env.axioms, env.divisible = axioms, divisible
            env.size_like = size_like | (env.size_like - symbols)
            env._version_counter += 1
            env._replacements_version_counter += 1
