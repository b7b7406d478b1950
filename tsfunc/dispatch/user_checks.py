"""Detection of checks: conditions whose code raises if they do not hold.

NOTE [checks of arguments]
``if x.shape[0] % 2: raise ValueError(...)``, ``assert n > 4`` and ``torch._check(n > 4)`` do not
choose between two results: one outcome of the test raises. A program that is traced past such a
check therefore holds for all arguments that pass it. The raising outcome is read off the bytecode
after the test: it reaches a ``raise`` without a branch, a return, or a store that is visible
outside the function; ``torch._check(bool(x))`` raises for False. A test may be of the result of a
call: ``assert x.all().item()``. The answer is None if the test, or a call on the way to it, is
inside a ``try`` with a clause that may end the exception; a clause that always raises does not.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_STEPS = 200  # the most instructions between a test and its raise
_ENDS = ("JUMP", "RETURN", "YIELD", "STORE_", "DELETE_", "FOR_ITER", "BEFORE_", "SETUP_", "RERAISE")
_CACHES = 5  # the most of an instruction, before the next
_CALLS = ("CALL", "PRECALL")
_CHECKS = frozenset(
    {"_check", "_check_value", "_check_index", "_check_type", "_check_not_implemented"}
)
_ALWAYS_JUMP = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_CATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")


def raising_outcome(frame: FrameType, *, catchable: bool = False) -> bool | None:
    """Return the outcome for which the test of a frame raises; None if the test is not a check.

    Args:
        frame: a frame whose last instruction tests the truth of a value, or calls what returns the
            truth of a value (``bool(x)``, ``x.item()``) and tests it next.
        catchable: True to count a test even if an ``except`` clause may catch the error.
    """
    steps, index_of_offset = _instructions(frame.f_code)
    at = _last_step(frame)
    if at is None:
        return None
    end, negated = _truth(steps, at)
    if end is not None and _is_checked(steps, end):
        outcome: bool | None = False
    else:
        outcome = _outcome(steps, index_of_offset, at if end is None else end + 1)
    if outcome is None or (not catchable and may_be_caught(frame)):
        return None
    return outcome is not negated


def _truth(steps: tuple[dis.Instruction, ...], at: int) -> tuple[int | None, bool]:
    """Return the step that leaves the truth of a value on the stack, and if it is negated.

    The step is None if the truth goes into a jump at once.
    """
    end = None
    if _calls_truth(steps, at):
        end = _end_of_call(steps, at)
        at = end + 1
    negated = False
    while True:
        following = at + (steps[at].opname == "TO_BOOL")  # a step of its own since Python 3.13
        if steps[following].opname != "UNARY_NOT":
            is_last = following > at and not steps[following].opname.startswith("POP_JUMP")
            return (at if is_last else end), negated
        end, at, negated = following, following + 1, not negated


def computes_check(frame: FrameType) -> bool:
    """True if the condition of a check is computed of the result of a frame's last instruction."""
    steps, index_of_offset = _instructions(frame.f_code)
    at = _last_step(frame)
    if at is None or not steps[at].opname.startswith(_CALLS):
        return False
    for i in range(_end_of_call(steps, at), min(len(steps), at + _STEPS)):
        if steps[i].opname.startswith("POP_JUMP"):
            return _outcome(steps, index_of_offset, i) is not None
        if _is_checked(steps, i):
            return True
        if any(end in steps[i].opname for end in _ENDS) or steps[i].opname == "POP_TOP":
            return False
    return False


def _outcome(
    steps: tuple[dis.Instruction, ...], index_of_offset: dict[int, int], at: int
) -> bool | None:
    """Return the outcome for which the test at a step raises."""
    at += steps[at].opname == "TO_BOOL"
    name = steps[at].opname
    if not (name.startswith("POP_JUMP") and name.endswith(("_IF_TRUE", "_IF_FALSE"))):
        return None
    jumps_if = name.endswith("TRUE")
    raises_at_jump = _raises(steps, index_of_offset.get(steps[at].argval))
    raises_next = _raises(steps, at + 1)
    if raises_at_jump == raises_next:
        return None
    return jumps_if if raises_at_jump else not jumps_if


def _end_of_call(steps: tuple[dis.Instruction, ...], at: int) -> int:
    """Return the last step of a call. In Python 3.11 it has two, and either makes it."""
    return at + (steps[at].opname == "PRECALL")


def _calls_truth(steps: tuple[dis.Instruction, ...], at: int) -> bool:
    """True if a step calls ``bool(x)``, ``x.item()`` or ``x.is_nonzero()``."""
    if not steps[at].opname.startswith(_CALLS):
        return False
    end = _end_of_call(steps, at)
    method = steps[end - 1 - (steps[end - 1].opname == "PRECALL")]
    if method.argval in ("item", "is_nonzero") and method.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        return True
    start = _start(steps, end)
    return (
        start is not None
        and "bool"
        in [
            step.argval
            for step in steps[start : start + 2]
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        ][:1]
    )


def _is_checked(steps: tuple[dis.Instruction, ...], at: int) -> bool:
    """True if a step's result is the first argument of one of torch's functions for checks."""
    start = _start(steps, at)
    if start is None:
        return False
    before = [step.argval for step in steps[:start] if step.opname != "PUSH_NULL"]
    return before[-2:-1] == ["torch"] and before[-1] in _CHECKS and _is_argument(steps, start, at)


def _is_argument(steps: tuple[dis.Instruction, ...], start: int, at: int) -> bool:
    """True if an expression from one step to another is a whole argument of a call."""
    for i in range(at + 1, min(len(steps), at + _STEPS)):
        if steps[i].opname.startswith("CALL") and (_start(steps, i) or 0) < start:
            end: int | None = i - 1
            while end is not None and end > at:  # back over the arguments behind it
                names = steps[i].opname.endswith("_KW") and end == i - 1
                if names or steps[end].opname in ("PRECALL", "KW_NAMES"):
                    end -= 1
                else:
                    first = _start(steps, end)
                    end = None if first is None else first - 1
            return end == at
    return False


def _start(steps: tuple[dis.Instruction, ...], at: int) -> int | None:
    """Return the first step of the expression whose value a step leaves on the stack."""
    depth = 0
    for i in range(at, -1, -1):
        depth += dis.stack_effect(steps[i].opcode, steps[i].arg, jump=False)
        if depth == 1:
            return i
    return None


@functools.lru_cache(maxsize=512)
def _instructions(code: CodeType) -> tuple[tuple[dis.Instruction, ...], dict[int, int]]:
    """Return the instructions of a function, and the index of each by its offset."""
    steps = tuple(dis.get_instructions(code))
    return steps, {step.offset: i for i, step in enumerate(steps)}


def _last_step(frame: FrameType) -> int | None:
    """Return the instruction that a frame runs, which may be a call with caches behind it."""
    index_of_offset = _instructions(frame.f_code)[1]
    before = range(frame.f_lasti, max(frame.f_lasti - 2 * _CACHES, 0) - 1, -2)
    return next((index_of_offset[at] for at in before if at in index_of_offset), None)


def _raises(steps: tuple[dis.Instruction, ...], at: int | None) -> bool:
    """True if the instructions from ``at`` on always reach a ``raise``."""
    if at is None:
        return False
    for step in steps[at : at + _STEPS]:
        if step.opname == "RAISE_VARARGS":
            return True
        if any(end in step.opname for end in _ENDS) and step.opname != "STORE_FAST":
            return False
    return False


def caller_may_catch() -> bool:
    """True if a function between the start of the trace and the caller's may catch an exception."""
    return may_be_caught(sys._getframe(2))


def may_be_caught(frame: FrameType) -> bool:
    """True if a function between the start of the trace and this frame may catch an exception."""
    caller: FrameType | None = frame
    while caller is not None:
        name = caller.f_globals.get("__name__", "")
        passes_on = caller is not frame and name.startswith(("torch.", "tsfunc."))
        if not passes_on and _catches(caller.f_code, caller.f_lasti):
            return True
        if caller.f_code in _STARTS:
            return False
        caller = caller.f_back
    return False


_STARTS: set[CodeType] = set()


def starts_trace(func: F) -> F:
    """Mark a function that runs the user's function in a trace; used as a decorator.

    An exception that reaches it leaves the traced function.
    """
    _STARTS.add(func.__code__)
    return func


@functools.lru_cache(maxsize=2048)
def _catches(code: CodeType, at: int) -> bool:
    """True if a function may catch an exception that the instruction at offset ``at`` raises."""
    steps, index_of_offset = _instructions(code)
    table = getattr(code, "co_exceptiontable", None)
    if table is None:  # before Python 3.11, blocks are instructions; any may hold it
        names = {step.opname for step in steps}
        bare = "POP_EXCEPT" in names and "WITH_EXCEPT_START" not in names
        return bare or any(name in names for name in _CATCHES)
    handlers = [handler for start, end, handler in _protected_ranges(table) if start <= at < end]
    return any(_may_end(steps, index_of_offset, index_of_offset[handler]) for handler in handlers)


def _may_end(steps: tuple[dis.Instruction, ...], index_of_offset: dict[int, int], at: int) -> bool:
    """True if a handler is an ``except`` or ``finally`` clause that may end the exception.

    The end of a ``with`` is not such a clause, and neither is one whose every path raises.
    """
    first, second = (steps[min(i, len(steps) - 1)].opname for i in (at, at + 1))
    if first != "PUSH_EXC_INFO" or second == "WITH_EXCEPT_START":
        return False
    pending, seen = [at], set()
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        step = steps[at]
        if step.opname == "POP_EXCEPT" or step.opname.startswith("RETURN"):
            return True
        if step.opname not in ("RERAISE", "RAISE_VARARGS", *_ALWAYS_JUMP):
            pending.append(at + 1)
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            pending.append(index_of_offset[step.argval])
    return False


def _protected_ranges(table: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the start and end of each protected range of a function, and its handler's offset.

    An entry has four numbers, with six bits a byte, the highest first: see CPython's notes on
    exceptions.
    """
    numbers: list[int] = []
    number = 0
    for byte in table:
        number = number << 6 | byte & 63
        if not byte & 64:  # the last one of the number
            numbers.append(number)
            number = 0
    for start, length, target, _ in zip(*[iter(numbers)] * 4, strict=True):
        yield 2 * start, 2 * (start + length), 2 * target


# --- lookups in containers


def looked_up(frame: FrameType) -> tuple[Collection[Any], bool] | None:
    """Return the container in which an instruction of a frame looks for a key.

    Args:
        frame: a frame whose last instruction is ``key in container`` or ``container[key]``.

    Returns:
        The dict or set, and whether the lookup needs the key: ``container[key]`` of a class that
        has ``__missing__`` may add it. None if the container is another object, or if the code does
        not show it: it is a constant, a variable, or an attribute of one.
    """
    steps, index_of_offset = _instructions(frame.f_code)
    at = index_of_offset.get(frame.f_lasti)
    if at is None:
        return None
    subscript = steps[at].opname == "BINARY_SUBSCR" or (
        steps[at].opname == "BINARY_OP" and steps[at].argrepr == "[]"  # since Python 3.14
    )
    if not subscript and steps[at].opname != "CONTAINS_OP":
        return None
    end = _operand(steps, at - 1) if subscript else at
    start = None if end is None else _operand(steps, end - 1)
    if start is None or end is None:
        return None
    value = _value(frame, steps[start], [step.argval for step in steps[start + 1 : end]])
    if not isinstance(value, dict | set | frozenset):
        return None
    return value, subscript and hasattr(type(value), "__missing__")


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL",
          "LOAD_NAME", "LOAD_CONST")  # fmt: skip


def _operand(steps: tuple[dis.Instruction, ...], at: int) -> int | None:
    """Return the first instruction of a variable with attributes that ends at ``at``, or None."""
    while at >= 0 and steps[at].opname == "LOAD_ATTR":
        at -= 1
    return at if at >= 0 and steps[at].opname in _LOADS else None


def _value(frame: FrameType, load: dis.Instruction, attributes: Sequence[str]) -> Any:
    """Return a constant, or the value of a variable or of an attribute of it; or None."""
    if load.opname == "LOAD_CONST":
        value = load.argval
    else:
        name = load.argval
        value = frame.f_locals.get(name, frame.f_globals.get(name))
    for attribute in attributes:
        try:
            value = object.__getattribute__(value, "__dict__").get(attribute)
        except (AttributeError, TypeError):
            return None
    return value
