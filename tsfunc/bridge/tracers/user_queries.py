"""Queries of a trace's values: those of user code become guards, all others are suppressed.

NOTE [queries of user code]
A program depends on the sizes, strides and other properties that the traced function reads. The
rules of operators, the kernels of transforms and torch's own checks read such properties too, but
only to compute a result. :class:`UserCode` is the function mode under which a trace runs the
function. torch takes the mode off its stack while the mode handles a call, and kernels run without
function modes, so the mode is active exactly while the function's own code runs. A transform that
the function calls runs under the mode too; its own queries are inside of :func:`transform_code`.

A query about a named dim restricts a trace to the sizes with the same result. When torch makes a
tracer, it queries whether the tracer is contiguous or empty. A tracer repeats known metadata, so
the results of these queries do not change the program, and add no guards.
"""

from __future__ import annotations

import bisect
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch._C import _autograd, _current_autograd_node, _is_torch_function_mode_enabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.user_code import Location, user_location

# --- queries of user code


F = TypeVar("F", bound=Callable[..., Any])


class UserCode(TorchFunctionMode):
    """The function mode that is active while the code of a traced function runs."""


class _QueryState(threading.local):
    """Attribute ``transform_code``: True inside of :func:`transform_code`.

    Each thread sets it before its first use: a frame of Dynamo may guard that it is not set.
    """

    def __init__(self) -> None:
        self.transform_code = False


_query_state = resets(_QueryState())


def in_user_code() -> bool:
    """True if the code of a traced function runs: NOTE [queries of user code]."""
    return (
        _is_torch_function_mode_enabled()
        and not _query_state.transform_code
        and any(isinstance(mode, UserCode) for mode in _get_current_function_mode_stack())
    )


@contextmanager
def transform_code() -> Iterator[None]:
    """Context manager: the queries of the block are those of a transform, and add no guards."""
    before, _query_state.transform_code = _query_state.transform_code, True
    try:
        yield
    finally:
        _query_state.transform_code = before


def caller_of_handlers() -> FrameType:
    """Return the frame whose call of torch reached the function handlers that run now."""
    current = at = inspect.currentframe()
    while True:
        while at is not None and at.f_code.co_name != _HANDLER:
            at = at.f_back
        while at is not None and at.f_back is not None and at.f_code.co_name == _HANDLER:
            at = at.f_back
        if at is None or at.f_code not in _passed_on:
            break
    frame = at or current
    assert frame is not None, "Python has frames"
    return frame


def forwards_call(method: F) -> F:
    """Mark a method of a tracer that forwards its call to the value of the tracer.

    ``caller_of_handlers`` does not stop there.
    """
    _passed_on.add(method.__code__)
    return method


_passed_on: set[CodeType] = set()


_HANDLER = "__torch_function__"  # the name that torch calls, of tracers' handlers and of modes'


# --- queries of symbolic sizes that add no guards


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PYTHON_TYPES: dict[type, Callable[[Any], Any]] = dict(
    zip(SYMBOLIC, (int, float, bool), strict=True)
)
"""The types of symbolic numbers, with those of the numbers that they stand for."""
LISTS = frozenset({list, tuple, torch.Size})
"""The sequences in which operators take numbers."""


def has_symbols(args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """True if there is a symbolic number among the arguments, or in a list of them."""
    return _any(args) or (bool(kwargs) and _any(kwargs.values()))


def _any(values: Any) -> bool:
    for value in values:
        kind = type(value)  # isinstance would read the property __class__ of a tracer
        if kind in PYTHON_TYPES or (kind in LISTS and _any(value)):
            return True
    return False


def same_size(left: Any, right: Any) -> bool:
    """True if two sizes are known to be equal; adds no guard."""
    return bool(_expression_text(left) == _expression_text(right))


def _expression_text(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def same_number(left: Any, right: Any) -> bool:
    """True if two numbers have one kind and are known to be equal; adds no guard."""
    if type(left) is not type(right):
        return False
    symbolic = type(left) in PYTHON_TYPES
    return bool(left.node.expr == right.node.expr if symbolic else left == right)


def statically_known_true(fact: Any) -> bool:
    """True if a fact about sizes is known to hold for all sizes; adds no guard."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)


def environment_of(shape: Sequence[Any]) -> Any:
    """Return the environment of the symbols in a shape; None without symbols."""
    for size in shape:
        if type(size) is torch.SymInt:
            return getattr(size.node, "shape_env", None)
    return None


def suppress_guards(fake: FakeTensorMode) -> AbstractContextManager[Any]:
    """Suppress the guards of a block that only makes views of known tensors."""
    return _NO_GUARDS if fake.shape_env is None else defer_guards(fake.shape_env)


def suppress_guards_of(shape: Sequence[Any]) -> AbstractContextManager[Any]:
    """Suppress the guards of a block on the sizes of one shape."""
    env = environment_of(shape)
    return _NO_GUARDS if env is None else defer_guards(env)


_NO_GUARDS: Final = nullcontext()  # fixed sizes


@contextmanager
def defer_guards(env: Any) -> Iterator[list[Any]]:
    """Decide a block's conditions on sizes by the hints, without guards; yield these conditions."""
    deferred: list[Any] = []
    answered: set[Any] = env.__dict__.setdefault("tsfunc_answered", set())
    evaluate = env.evaluate_expr
    evaluated: list[Any] = []

    def evaluate_expr(expr: Any, *args: Any, **kwargs: Any) -> Any:
        evaluated.append(expr)
        try:
            with env.suppress_guards():
                value = evaluate(expr, *args, **kwargs)
        finally:
            evaluated.pop()
        if expr in answered:
            deferred.append(expr)
        return value

    def log_guard(*args: Any, **kwargs: Any) -> None:
        # ShapeEnv calls this once for each condition that does not follow from the bounds.
        if evaluated:
            answered.add(evaluated[-1])

    outer = {name: env.__dict__.get(name) for name in ("evaluate_expr", "_log_guard")}
    env.evaluate_expr, env._log_guard = evaluate_expr, log_guard
    try:
        yield deferred
    finally:
        for name, before in outer.items():
            delattr(env, name) if before is None else setattr(env, name, before)


# --- the user's lines of calls


class UserLines:
    """Finds the user's line of a call; in a backward pass, the line of the forward call.

    Autograd numbers its nodes as it makes them, each just before its operator reaches a tracer.
    The node with number n therefore belongs to the first call that found the counter beyond n.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._locations: list[Location] = []

    def here(self, skip: int = 0) -> tuple[Location, bool]:
        """Return the line, and True if the call belongs to its backward pass.

        Args:
            skip: the number of the callers, beginning with the direct one, that are this package's.
        """
        node = _current_autograd_node()
        location = self._of(node._sequence_nr()) if node is not None else None
        backward = location is not None
        location = location or user_location(skip + 1)
        number = _autograd._get_sequence_nr()
        # An autograd thread has a counter of its own.
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._locations.append(location)
        return location, backward

    def _of(self, number: int) -> Location | None:
        i = bisect.bisect_right(self._numbers, number)
        return self._locations[i] if i < len(self._locations) else None
