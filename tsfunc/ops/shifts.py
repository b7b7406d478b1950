"""Shifts: how a batching rule changes its arguments if the batch dim is first, as data.

Most rules of views, reductions and scans call the operator once, with each dim shifted past the
batch dim, and with the size of the batch before the sizes of a shape. A rule that declares this can
be run as data: compiled handlers shift the arguments of the operator themselves (``call_plans``),
even if a Python function is called. The declaration holds for calls in which every tensor is
batched, with the batch dim first, and all have the same rank, with at least one logical dim. The
rule serves all other calls, and those that raise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R", bound=Callable[..., Any])


class Shift(enum.IntEnum):
    """The change of one argument. The numbers are those of ``compiled/plans.h``."""

    SAME = 0  # passed as it is
    DIM = 1  # a dim
    NEW_DIM = 2  # a dim of the result, which has one dim more
    DIMS = 3  # a dim, or several
    SIZES = 4  # the sizes of the result
    ALL_SIZES = 5  # the same, for a result of the same rank only
    ORDER = 6  # all dims in a new order
    FEW = 7  # a tensor with at most three logical dims: others may have the channels last
    INDEX = 8  # all arguments of a Python call ``x[index]`` or ``x[index] = value``


def shift_arguments(*changes: Shift) -> Callable[[R], R]:
    """Decorate a rule that changes its arguments so, if the batch dim is first.

    Args:
        changes: the changes of the first arguments; others are passed as they are. A call in which
            one of these arguments has another type, as None has, is left to the rule.
    """

    def declare(rule: R) -> R:
        rule.shifts = tuple(map(int, changes))  # type: ignore[attr-defined]
        return rule

    return declare


def shifts_of(rule: Any) -> tuple[int, ...] | None:
    """Return the changes that a rule declares, or None."""
    return getattr(rule, "shifts", None)
