"""Facts about symbolic numbers that hold in a part of a trace alone.

``torch._check(n > 3)`` in a branch is checked where that branch is taken. What it says must not be
known outside, where ``n > 3`` would be answered by it.

Private names used here (torch 2.11 to 2.13): of ShapeEnv the tables of what it knows, by symbol
(``var_to_range``, ``replacements``, ``deferred_runtime_asserts``, ``size_like``) and by expression
(``axioms``, ``divisible``); ``num_deferred_runtime_asserts``, which counts what was asserted;
``_version_counter`` and ``_replacements_version_counter``, which tell its caches that the tables
are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def facts_of_its_own(env: Any) -> Iterator[None]:
    """What is asserted in the block is forgotten after it, but of symbols that it has made.

    Args:
        env: the environment of the symbols; None where there is none yet.
    """
    if env is None:
        yield
        return
    symbols, count = frozenset(env.var_to_range), env.num_deferred_runtime_asserts
    tables = env.var_to_range, env.replacements, env.deferred_runtime_asserts
    before = [dict(table) for table in tables]
    asserted = {symbol: list(facts) for symbol, facts in env.deferred_runtime_asserts.items()}
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
