"""The environment of symbolic sizes: torch's ShapeEnv, with the user's line for each guard.

torch's modules of ShapeEnv import sympy, which takes half a second, so they are imported when the
first symbol is made.

NOTE [scoped constraints]
``torch._check(n > 3)`` in a branch is checked only if that branch is taken. Code outside of the
branch must not rely on the constraint: the condition ``n > 3`` is still unknown there.
ShapeEnv has tables of constraints by symbol (``var_to_range``, ``replacements``,
``deferred_runtime_asserts``, ``size_like``) and by expression (``axioms``, ``divisible``); its
version counters invalidate its caches. ``scoped_constraints`` restores them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.autograd import forward_ad

from tsfunc._lazy import call_uninterrupted, load
from tsfunc.bridge.tracers.user_queries import in_user_code
from tsfunc.dispatch.user_checks import may_be_caught, raising_outcome
from tsfunc.user_code import Location, user_location


class SignedZeroError(Exception):
    """Internal: the value of a symbolic float was read, and is 0.0 or -0.0.

    The guard for other calls would be ``== 0``, which holds for both zeros. The numbers that the
    float depends on are therefore specialized.
    """


@functools.cache
def environment_class() -> Any:
    load("torch.fx.experimental.symbolic_shapes")
    from sympy import Float
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    base: Any = ShapeEnv
    cached = {
        name: member for name, member in vars(ShapeEnv).items() if hasattr(member, "cache_clear")
    }

    class Environment(base):  # type: ignore[misc]
        """A ShapeEnv that notes the user's line of each guard.

        Attributes:
            symbols: the owner, which writes assertions into the program.
            guard_origins: for each guard the line, True if it is required as it was tested (as the
                conditions of user code are), and True if the function raises otherwise.
            kept: its methods that cache their results.
            reasons: for a line, why this package needs a size as a number there.
            counts: True while an operator computes its number of results, which must stay the same.
            parts: symbols of slices and rows at positions of data: NOTE [parts at data].
        """

        def __init__(self, symbols: Any) -> None:
            self.kept = {name: _CachedMethod(self, method) for name, method in cached.items()}
            methods = vars(Environment)  # the methods defined here call the cached ones
            self.__dict__.update({name: x for name, x in self.kept.items() if name not in methods})
            start = functools.partial(
                super().__init__, duck_shape=False, allow_scalar_outputs=True,
                allow_dynamic_output_shape_ops=True,
            )  # fmt: skip
            call_uninterrupted(start)  # the first one imports hundreds of modules
            self.symbols = symbols
            self.guard_origins: list[tuple[Location, bool, bool]] = []
            self.reasons: dict[Location, str] = {}
            self.counts = False
            self.refused: Any = None  # the last condition on data that has no answer
            self.parts: dict[Any, Any] = {}

        def evaluate_expr(self, expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                answer = super().evaluate_expr(expr, *args, **kwargs)
                if isinstance(answer, Float | float) and float(answer) == 0:
                    raise SignedZeroError(f"{expr} is 0.0 or -0.0")
                return answer
            except GuardOnDataDependentSymNode:
                answer = _answer_of_data(self, expr, inspect.currentframe())
                if answer is None:
                    self.refused = expr
                    raise
                return answer
            finally:
                new = len(self.guards) - len(self.guard_origins)
                if new > 0:
                    self.guard_origins += [_guard_origin(self, inspect.currentframe())] * new

        def guard_or_defer_runtime_assert(self, expr: Any, *args: Any, **kwargs: Any) -> Any:
            count = self.num_deferred_runtime_asserts
            holds = self.kept["guard_or_defer_runtime_assert"](expr, *args, **kwargs)
            if self.num_deferred_runtime_asserts > count:
                self.symbols.assert_in_program(expr, user_location())
            return holds

    return Environment


def _answer_of_data(env: Any, expr: Any, evaluating: FrameType | None) -> Any:
    """Return the value of a condition on sizes that depend on data; None if it has none.

    Args:
        evaluating: the frame of ``evaluate_expr``.
    """
    from sympy import Not, false
    from sympy.logic.boolalg import Boolean

    caller, _ = _querying_frame(evaluating)
    if caller is None and forward_ad._current_level >= 0 and _is_emptiness_query(expr):
        return false  # NOTE [tangents of unknown sizes]
    if not isinstance(expr, Boolean):
        return None
    refused = None if caller is None else raising_outcome(caller)
    if refused is None:
        return env.symbols.answer(expr)
    # NOTE [checks of arguments]: the program checks the fact when it runs.
    env.guard_or_defer_runtime_assert(Not(expr) if refused else expr, "")
    return not refused


def _guard_origin(env: Any, evaluating: FrameType | None) -> tuple[Location, bool, bool]:
    """Return an entry of ``guard_origins``, for a guard that ``evaluate_expr`` has added."""
    caller, called = _querying_frame(evaluating)
    users = caller is not None and in_user_code()
    by_user = users and not _PYTHON_QUERIES.isdisjoint(called)
    is_check = caller is not None and (
        raising_outcome(caller) is not None
        or (users and not _CHECKS.isdisjoint(called) and not may_be_caught(caller))
    )
    return user_location(), by_user or env.counts, is_check


def needed_number(size: Any, reason: str) -> int:
    """Return a size as a Python number.

    Args:
        size: the size, which may be symbolic.
        reason: what needs the number, and the remedy, for the error if descriptors leave it open.
    """
    reasons = getattr(size.node.shape_env, "reasons", None) if type(size) is torch.SymInt else None
    if reasons is not None:
        reasons[user_location()] = reason
    return int(size)


class _CachedMethod:
    """A method of one environment, with a cache of its own.

    torch has one cache per method for all environments. That cache holds each environment, and so
    its trace, forever or until the next condition in a changed environment. Traces of many sizes
    would fill the memory. Each environment therefore has its own caches.

    Args:
        method: torch's cached method: an ``functools.lru_cache``, or a wrapper of one that clears
            the cache when the environment learns more.
    """

    __slots__ = ("_call", "_env", "_for_good", "_known", "_version")

    def __init__(self, env: Any, method: Any) -> None:
        self._env, self._call = env, method.__wrapped__
        self._for_good = isinstance(method, type(_LRU))
        self._known: dict[Any, Any] = {}
        self._version = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._for_good and self._version != self._env._version_counter:
            self._version = self._env._version_counter
            self._known = {}
        results, key = self._known, (args, tuple(kwargs.items()))
        if key not in results:
            results[key] = self._call(self._env, *args, **kwargs)
        return results[key]

    def cache_clear(self) -> None:
        """Clear the cache; torch calls this method by its name."""
        self._known = {}


_LRU = functools.lru_cache(len)


# NOTE [tangents of unknown sizes]
# When C++ gives a tensor its tangent, it compares their strides and storages, and first tests
# whether the tensor is empty. The outcome does not matter: an empty tangent is kept or copied.
def _is_emptiness_query(expr: Any) -> bool:
    from sympy import Eq

    return isinstance(expr, Eq) and 0 in expr.args


def count_of(size: Any) -> int:
    """Return a size as an operator's number of results, as an int, with a guard on its value."""
    if isinstance(size, int):
        return size
    env = size.node.shape_env
    env.counts = True
    try:
        return int(size)
    finally:
        env.counts = False


def _querying_frame(evaluating: FrameType | None) -> tuple[FrameType | None, set[CodeType]]:
    """Return the frame of the Python code that tests a condition, and the functions that it calls.

    The frame is None if torch's C++ tests the condition. Python calls a method of a symbolic
    number, as ``if n > 2`` and ``range(n)`` do, or one of torch's checks.

    Args:
        evaluating: the frame of ``evaluate_expr``; a further one belongs to another condition.
    """
    tests = _PYTHON_QUERIES | _CHECKS
    called: set[CodeType] = set()
    frame = evaluating and evaluating.f_back
    while frame is not None and frame.f_code not in tests:
        if evaluating is not None and frame.f_code is evaluating.f_code:
            return None, called
        frame = frame.f_back
    while frame is not None and frame.f_code in tests:
        called.add(frame.f_code)
        frame = frame.f_back
    return frame, called


# Functions of torch that raise if a condition is false. Inside of operators they check arguments,
# which ``equalities`` handles.
_CHECKS = {
    check.__code__
    for name, member in vars(torch).items()
    if name.startswith("_check") and isinstance(member, FunctionType)
    for check in (member, inspect.unwrap(member))
} | {torch._assert.__code__}


# The methods by which Python tests conditions. torch's C++ tests others, and is called from the
# same frame: the user's ``contiguous()`` tests whether a tensor is contiguous.
_PYTHON_QUERIES = {
    method.__code__
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)
    for name in ("__bool__", "__int__", "__index__", "__float__")
    if isinstance(method := getattr(kind, name, None), FunctionType)
}


def source_called(text: str) -> Any:
    """Return a named origin for a symbol, which ShapeEnv requires."""
    from torch._guards import Source

    class NamedDim(Source):
        @property
        def name(self) -> str:
            return text

        @property
        def _name_template(self) -> str:
            return text

        def __hash__(self) -> int:
            return hash(text)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, NamedDim)

    return NamedDim()


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
