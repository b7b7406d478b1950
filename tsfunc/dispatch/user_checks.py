"""Detection of checks: conditions whose code raises if they do not hold.

NOTE [checks of arguments]
``if x.shape[0] % 2: raise ValueError(...)``, ``assert n > 4`` and ``torch._check(n > 4)`` do not
choose between two results: one outcome of the test raises. A program that is traced past such a
check therefore holds for all arguments that pass it. The raising outcome is read off the bytecode
after the test: it reaches a ``raise`` without a branch, a return, or a store that is visible
outside the function; ``torch._check(bool(x))`` raises for False. The answer is None if the test, or
a call on the way to it, is inside a ``try`` with an ``except`` clause, which may catch the
exception.
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
_CATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")


def raising_outcome(frame: FrameType, *, catchable: bool = False) -> bool | None:
    """Return the outcome for which the test of a frame raises; None if the test is not a check.

    Args:
        frame: a frame whose last instruction tests the truth of a value.
        catchable: True to count a test even if an ``except`` clause may catch the error.
    """
    code = frame.f_code
    steps, index_of_offset = _instructions(code)
    at = index_of_offset.get(frame.f_lasti)
    if at is None:
        return None
    if _is_checked(steps, at):
        return False if catchable or not may_be_caught(frame) else None
    if steps[at].opname == "TO_BOOL":  # a step of its own since Python 3.13
        at += 1
    name = steps[at].opname
    if not (name.startswith("POP_JUMP") and name.endswith(("_IF_TRUE", "_IF_FALSE"))):
        return None
    jumps_if = name.endswith("TRUE")
    raises_at_jump = _raises(steps, index_of_offset.get(steps[at].argval))
    raises_next = _raises(steps, at + 1)
    if raises_at_jump == raises_next or (not catchable and may_be_caught(frame)):
        return None
    return jumps_if if raises_at_jump else not jumps_if


def _is_checked(steps: tuple[dis.Instruction, ...], at: int) -> bool:
    """True if a step calls ``bool`` for the first argument of ``torch._check``."""
    if not steps[at].opname.startswith(("CALL", "PRECALL")):
        return False
    # In Python 3.11 a call has two steps, and either makes it.
    at -= 1 + (steps[at].opname == "CALL" and steps[at - 1].opname == "PRECALL")
    depth = 0
    for i in range(at, 0, -1):  # back to the load of `bool`, which has one value on top of it
        step = steps[i]
        if depth == 1 and step.argval == "bool" and step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            before = [x.argval for x in steps[:i] if x.opname != "PUSH_NULL"]
            return before[-2:] == ["torch", "_check"]
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
    return False


@functools.lru_cache(maxsize=512)
def _instructions(code: CodeType) -> tuple[tuple[dis.Instruction, ...], dict[int, int]]:
    """Return the instructions of a function, and the index of each by its offset."""
    steps = tuple(dis.get_instructions(code))
    return steps, {step.offset: i for i, step in enumerate(steps)}


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
    return any(_is_clause(steps, index_of_offset[handler]) for handler in handlers)


def _is_clause(steps: tuple[dis.Instruction, ...], at: int) -> bool:
    """True if a handler is an ``except`` or ``finally`` clause and not the end of a ``with``."""
    first, second = (steps[min(i, len(steps) - 1)].opname for i in (at, at + 1))
    return first == "PUSH_EXC_INFO" and second != "WITH_EXCEPT_START"


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
