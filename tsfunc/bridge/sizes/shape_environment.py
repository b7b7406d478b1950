"""The environment of symbolic sizes: torch's, which notes the user's line of what it is asked.

Private names used here (torch 2.11 to 2.13): ``torch.fx.experimental.symbolic_shapes`` has
ShapeEnv, of which ``evaluate_expr`` answers what is asked of sizes, ``guards`` lists it, and
``guard_or_defer_runtime_assert`` and ``num_deferred_runtime_asserts`` are about what can't be
answered yet, and ``_version_counter`` tells its caches that it knows more;
``torch._guards.Source`` says where a symbol comes from. They import sympy, which
takes half a second, so they are imported where the first symbol is made.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from tsfunc.dispatch.places import Place, is_users, users_place
from tsfunc.dispatch.refusals import may_be_caught, refused_value


class SignedZeroError(Exception):
    """Internal: a symbolic float was asked for its number, which is 0.0 or -0.0.

    The condition for other calls would be that it is equal to 0, as both are. So the numbers that
    it follows from are burnt in.
    """


@functools.cache
def environment_class() -> Any:
    from sympy import Float, Not
    from sympy.logic.boolalg import Boolean
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    base: Any = ShapeEnv
    cached = {name: each for name, each in vars(ShapeEnv).items() if hasattr(each, "cache_clear")}

    class Environment(base):  # type: ignore[misc]
        """An environment that notes the user's line of what it is asked.

        Attributes:
            symbols: whose it is; it has what is asserted written into the program.
            asked: for each guard the line, whether it is meant as it is asked, which the user's
                code does, and whether the function raises where it does not hold.
            kept: those of its methods that keep what they return.
            counts: whether what is asked now is how many results an operator has, which is meant.
        """

        def __init__(self, symbols: Any) -> None:
            self.kept = {name: _Kept(self, method) for name, method in cached.items()}
            own = vars(Environment)  # what is written out here calls the one that is kept
            self.__dict__.update({name: x for name, x in self.kept.items() if name not in own})
            super().__init__(
                duck_shape=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True
            )
            self.symbols = symbols
            self.asked: list[tuple[Place, bool, bool]] = []
            self.counts = False

        def evaluate_expr(self, expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                answer = super().evaluate_expr(expr, *args, **kwargs)
                if isinstance(answer, Float | float) and float(answer) == 0:
                    raise SignedZeroError(f"{expr} is 0.0 or -0.0")
                return answer
            except GuardOnDataDependentSymNode:
                refused = refused_value(asking_frame()) if isinstance(expr, Boolean) else None
                if refused is None:
                    raise
                # NOTE [checks of arguments]: the program checks it when it runs.
                self.guard_or_defer_runtime_assert(Not(expr) if refused else expr, "")
                return not refused
            finally:
                new = len(self.guards) - len(self.asked)
                if new > 0:
                    frame, through = _way_to_asking()
                    in_user_code = is_users(frame)
                    is_check = refused_value(frame) is not None or (
                        not _CHECKS.isdisjoint(through)
                        and in_user_code
                        and not may_be_caught(frame)
                    )
                    by_user = in_user_code and not _PYTHONS_QUESTIONS.isdisjoint(through)
                    self.asked += [(users_place(), by_user or self.counts, is_check)] * new

        def guard_or_defer_runtime_assert(self, expr: Any, *args: Any, **kwargs: Any) -> Any:
            count = self.num_deferred_runtime_asserts
            holds = self.kept["guard_or_defer_runtime_assert"](expr, *args, **kwargs)
            if self.num_deferred_runtime_asserts > count:
                self.symbols.assert_in_program(expr, users_place())
            return holds

    return Environment


class _Kept:
    """A method of an environment that keeps what it returns.

    torch has one cache a method for all environments. It keeps each that was asked, and so the
    trace that it is of: for good, or until one is asked that knows more or less than the last one.
    Traces of many sizes would fill the memory. So each environment has caches of its own.

    Args:
        env: the environment.
        method: as torch keeps its results: by ``functools.lru_cache``, or by what is around that
            and forgets them when the environment knows more.
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
        known, key = self._known, (args, tuple(kwargs.items()))
        if key not in known:
            known[key] = self._call(self._env, *args, **kwargs)
        return known[key]

    def cache_clear(self) -> None:
        """Forgets all of it; torch calls it by this name."""
        self._known = {}


_LRU = functools.lru_cache(len)


def count_of(size: Any) -> int:
    """A size as the number of results that an operator has for it, which is the trace's own."""
    if isinstance(size, int):
        return size
    env = size.node.shape_env
    env.counts = True
    try:
        return int(size)
    finally:
        env.counts = False


def asking_frame() -> FrameType:
    """The frame that asks a symbolic number for its value, by a test or in a call."""
    return _way_to_asking()[0]


def _way_to_asking() -> tuple[FrameType, set[CodeType]]:
    """That frame, and the functions that it asks by."""
    frame = inspect.currentframe()
    assert frame is not None
    through = set()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ANSWERING):
        through.add(frame.f_code)
        frame = frame.f_back
    return frame, through


# What raises if the answer is no. Where torch's own code calls it, it asks of operators' arguments,
# which is another matter (``equalities``).
_CHECKS = {torch._check_with.__code__, torch._assert.__code__}


# By these Python asks. What is asked without them is a question of torch's C++, which is called
# from the same frame: whether a tensor is contiguous, where the user's code calls ``contiguous()``.
_PYTHONS_QUESTIONS = {
    method.__code__
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)
    for name in ("__bool__", "__int__", "__index__", "__float__")
    if isinstance(method := getattr(kind, name, None), FunctionType)
}


# Where torch's symbolic numbers, and our tracers, work their answers out.
_BRIDGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


_ROOT = os.path.dirname(torch.__file__) + os.sep


_ASKED = (
    "sizes/symbols", "sizes/shape_environment", "trace/tracing", "tracers/tracer",
    "tracers/attributes", "tracers/questions", "control/bodies",
)  # fmt: skip


_ANSWERING = (
    *(f"{_BRIDGE}{name.replace('/', os.sep)}.py" for name in _ASKED),
    *(_ROOT + name for name in ("__init__.py", "fx", "utils", "_tensor.py", "overrides.py")),
)


def source_called(text: str) -> Any:
    """Where a symbol comes from, which ShapeEnv wants to be told."""
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
