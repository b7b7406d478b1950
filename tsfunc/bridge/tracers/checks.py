"""Checks of values inside of transforms: tests that raise for one outcome.

NOTE [checks of batches]
``if x < 0: raise ValueError(...)``, ``assert x > 0`` and ``torch._check_tensor_all(x > 0)`` do not
choose between two results (NOTE [checks of arguments] in ``dispatch/user_checks``), so a vmap can
serve them although the value differs from example to example. If every example passes, the
function goes on. If an example fails, the function gets the outcome that raises, as the loop over
the examples would; a note of the error (PEP 678) names the examples that fail. If only some of them
fail and the function catches the error, the examples would have to go on in different ways. The
vmap then raises a DataDependentError when the function returns.

From the first transform on, torch's own functions for checks take batched tensors too, where
``torch._check`` refuses a tensor and ``torch._check_tensor_all`` calls ``item()``.

NOTE [checks of distributions]
The constraints of ``torch.distributions`` for matrices end early if an earlier condition fails, as
in ``if not symmetric.all(): return symmetric``. The distribution raises for a condition that is not
True everywhere, so the early end is a check too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch.distributions import Distribution, constraints

from tsfunc import hooks
from tsfunc.bridge.tracers.batch_tracer import BatchTracer, unwrap
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.registrations import on_first_transform
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.bridge.tracers.tracer_stack import unwrap_all
from tsfunc.bridge.tracers.user_queries import caller_of_handlers, forwards_call
from tsfunc.dispatch.user_checks import may_be_caught, raising_outcome
from tsfunc.errors import DataDependentError
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.user_code import Location, user_location

_SHOWN: Final = 10  # maximum number of examples in a message

_MATRIX_CONSTRAINTS: Final[set[CodeType]] = {
    type(constraint).check.__code__
    for constraint in (constraints.symmetric, constraints.positive_semidefinite,
                 constraints.positive_definite)
}  # fmt: skip
_VALIDATIONS: Final = {Distribution.__init__.__code__, Distribution._validate_sample.__code__}


def refused_outcome(*, catchable: bool) -> bool | None:
    """Return the outcome for which the test that runs now raises; None if it is not a check.

    Args:
        catchable: True to count a test even if an ``except`` clause may catch the error.
    """
    frame = caller_of_handlers()
    if frame.f_code in _MATRIX_CONSTRAINTS:
        caller: FrameType | None = frame
        while caller is not None and caller.f_code in _MATRIX_CONSTRAINTS:
            caller = caller.f_back
        if caller is None or caller.f_code not in _VALIDATIONS:
            return None
        return False if catchable or not may_be_caught(caller) else None
    return raising_outcome(frame, catchable=catchable)


class FailedCheck:
    """A check that some examples of the active vmaps fail.

    Attributes:
        examples: the indices of the examples, an entry for each vmap, outermost first.
        count: the number of all examples.
        levels: the levels of the vmaps that the error has not left yet.
        noted: True if the error has a note.
        location: the user's line.
    """

    def __init__(
        self, examples: Sequence[tuple[int, ...]], count: int, levels: Sequence[TracerLevel]
    ) -> None:
        self.examples = examples
        self.count = count
        self.levels = set(levels)
        self.noted = False
        self.location: Location = user_location()

    def repeats(self, other: FailedCheck) -> bool:
        """True if the same examples have failed: a program's check that its function repeats."""
        return (self.examples, self.levels) == (other.examples, other.levels)

    def __str__(self) -> str:
        return (
            f"The check failed for {len(self.examples)} of {self.count} examples"
            + examples_text(self.examples)
        )


def examples_text(examples: Sequence[tuple[int, ...]]) -> str:
    """Return the end of a message that lists examples."""
    names = [str(example[0] if len(example) == 1 else example) for example in examples[:_SHOWN]]
    return f": {', '.join(names)}{', ...' if len(examples) > _SHOWN else ''}"


# The failed checks whose errors have not left their vmaps yet.
FAILED_CHECKS: Final[list[FailedCheck]] = []


@forwards_call
@hooks.outcome_of_check.add
def outcome_of_check(tracer: BatchTracer) -> bool | None:
    """Return the outcome of the test that runs now on a batched tracer; None if it is not a check.

    If an example fails, :data:`FAILED_CHECKS` gets the check. Values of traces are reduced to one
    value, which the trace asserts.
    """
    refused = refused_outcome(catchable=True)
    return None if refused is None else _outcome(tracer, refused)


@forwards_call
def _outcome(tracer: BatchTracer, refused: bool) -> bool:
    """Return the outcome of a test for all examples, and record those with a refused outcome."""
    holds = tracer.reshape(()) != 0
    level = tracer.dispatch_level
    value, stack = unwrap_all(holds)
    if type(value) is not torch.Tensor:
        with level.restored():
            below, _ = unwrap(holds, level)
            return bool(below.any() if refused else below.all())
    value = stack.batch_dims_first(value)
    failed = (value if refused else ~value).nonzero()
    if not len(failed):
        return not refused
    indices = [batch_level.example_indices(value.device) for batch_level in stack.batch_levels]
    examples = [tuple(int(x[i]) for x, i in zip(indices, at, strict=True)) for at in failed]
    roots = [batch_level.original.root for batch_level in reversed(stack.batch_levels)]
    check = FailedCheck(examples, value.numel(), roots)
    if not any(check.repeats(failed) for failed in FAILED_CHECKS):
        FAILED_CHECKS.append(check)
    return refused


def note_failed_checks(error: BaseException, level: TracerLevel) -> None:
    """Name the examples of a failed check in a note of the error that leaves their vmap."""
    for check in [failed for failed in FAILED_CHECKS if level in failed.levels]:
        if sys.version_info >= (3, 11) and not check.noted:
            error.add_note(str(check))
        check.noted = True
        check.levels.remove(level)
        if not check.levels:
            FAILED_CHECKS.remove(check)


def refuse_caught_checks(level: TracerLevel) -> None:
    """Raise if the function of a vmap has caught the error of a check that some examples pass.

    Raises:
        DataDependentError: the function has caught such an error.
    """
    failed = [check for check in FAILED_CHECKS if level in check.levels]
    for check in failed:
        FAILED_CHECKS.remove(check)
    for check in failed:
        if len(check.examples) < check.count:
            raise DataDependentError(
                f"{level.name}, at {check.location}: expected a check that all examples pass or "
                f"fail, because the function catches its error, got one that "
                f"{len(check.examples)} of {check.count} examples "
                f"fail{examples_text(check.examples)}. "
                f"Choose by torch.where or tsfunc.cond, or pass data_dependent='split'."
            )


def _raised(error_type: type[Exception], message: Callable[[], Any] | None) -> Exception:
    return error_type("Expected cond to be True, but got False." if message is None
                      else str(message()))  # fmt: skip


def is_batched(value: Any) -> bool:
    """True for a tensor of a vmap, also one that other transforms differentiate by."""
    return isinstance(innermost_value(value, GradTracer), BatchTracer)


# torch's functions for checks take batched tensors, and tensors of a trace.
_with_bool: Any = torch._check_with
_with_tensor: Any = torch._check_tensor_all_with


@functools.wraps(_with_bool)
def _check_with(error_type: Any, cond: Any, message: Any) -> None:
    if not is_batched(cond):
        _with_bool(error_type, cond, message)
    elif not cond.all():
        raise _raised(error_type, message)


@functools.wraps(_with_tensor)
def _check_tensor_all_with(error_type: Any, cond: Any, message: Any = None) -> None:
    if not isinstance(cond, Tracer) or cond.dtype is not torch.bool:
        _with_tensor(error_type, cond, message)
    elif not cond.all():
        raise _raised(error_type, message)


on_first_transform(setattr, torch, "_check_with", _check_with)
on_first_transform(setattr, torch, "_check_tensor_all_with", _check_tensor_all_with)


def _is_all_true(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return a bool for each example; the operator's own rule reduces over the batch."""
    (value,) = args
    return value.all()


def _assert_async(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Name the examples that fail, where reading the condition does not wait for a device."""
    condition, *message = args
    value = innermost_value(condition, BatchTracer | GradTracer)
    if not is_batched(condition) or type(value) is not torch.Tensor or not value.is_cpu:
        return NotImplemented
    if condition.numel() != 1:
        raise RuntimeError(f"_assert_async: expected one value, got {condition.numel()}.")
    if not _outcome(condition, refused=False):
        raise RuntimeError(*message or ("Expected Tensor with single nonzero value, but got zero",))
    return None


function_rules: Final = FunctionRules()
function_rules.add(Stage.METHOD, _assert_async, torch._assert_async)
function_rules.add(Stage.METHOD, _is_all_true, torch._is_all_true, torch.Tensor._is_all_true)
