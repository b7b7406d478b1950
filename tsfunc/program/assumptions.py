"""The assumptions that a trace is made under.

NOTE [retracing]
A function is traced under assumptions, at first those that give the most general and cheapest
program. A trace that shows that one of them does not hold raises ``Retrace`` with the assumptions
for the next trace. A trace that fails is followed by one under weaker assumptions, until the error
is that of the function itself. ``trace_until_valid`` is this loop.

Each assumption moves one way only, so the number of assumptions bounds the number of traces. Other
hints are an exception: they belong to the sizes that are symbols, and start over when another
assumption moves. Each trace undoes its effects on objects outside before the next begins.

``records_autograd`` is remembered by the cache: the next cache miss begins with it. Other
assumptions are about the arguments of one call, or were given up for a reason that may not be
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from tsfunc.errors import ConstraintViolation
from tsfunc.types import Dim
from tsfunc.user_code import AbandonedRun

T = TypeVar("T")


@dataclass(frozen=True)
class Assumptions:
    """The assumptions that a trace is made under.

    The direction in which an assumption moves is in parentheses.

    Attributes:
        varying: the sizes and numbers, by the user's spelling, that have varied and become inputs:
            NOTE [automatic dynamic sizes] (loses members).
        dims: the named dims in place of the sizes among them, by the sizes' spelling (become
            narrower).
        narrowed: the number of times that ``dims`` have become narrower.
        closure_numbers: numbers outside that have varied are inputs: NOTE [numbers that vary]
            (becomes False).
        described_numbers: numbers whose descriptor is their type are inputs (becomes False).
        fixed: the named dims that have the sizes of the call (gains members).
        other_hints: the named dims that are traced with other hints than their sizes in the call:
            NOTE [small sizes] (gains members).
        refusal: the error for a trace that fails with other hints, too.
        guards_changed: variables that the function only changes are guarded as well, since it puts
            tensors into them: NOTE [counters] (becomes True).
        records_autograd: autograd records during the trace, for backward passes that the function
            runs itself: NOTE [backward passes in programs] (becomes True).
        autograd_is_remembered: ``records_autograd`` is remembered from an earlier call (becomes
            False, together with ``records_autograd``, if the function runs no backward pass).
        compares_identity: the function compares its tensors by identity: NOTE [tensor aliasing]
            (becomes True).
        closure_tensors: the tensors, by id, that the function has from elsewhere and gets as
            arguments, too (gains members).
    """

    varying: frozenset[str] = frozenset()
    dims: Mapping[str, Dim] = field(default_factory=dict)
    narrowed: int = 0
    closure_numbers: bool = True
    described_numbers: bool = True
    fixed: frozenset[str] = frozenset()
    other_hints: frozenset[str] = frozenset()
    refusal: ConstraintViolation | None = field(default=None, compare=False)
    guards_changed: bool = False
    records_autograd: bool = False
    autograd_is_remembered: bool = False
    compares_identity: bool = False
    closure_tensors: Mapping[int, torch.Tensor] = field(default_factory=dict, compare=False)

    def with_changes(self, **changes: Any) -> Assumptions:
        """Return these assumptions with changes.

        A change of what is a symbol resets ``other_hints`` and ``refusal``, which belong to the
        old symbols.
        """
        hints: dict[str, Any] = {"other_hints": frozenset(), "refusal": None}
        return replace(self, **(hints if changes.keys() & _OF_SYMBOLS else {}), **changes)

    @property
    def steps(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The progress, which bounds the number of traces.

        A number may fall only if a number of an earlier tuple rises.
        """
        of_symbols = (
            self.narrowed,
            -len(self.varying),
            not self.closure_numbers,
            not self.described_numbers,
            len(self.fixed),
        )
        of_objects: tuple[int, ...] = (
            self.guards_changed, self.records_autograd, self.compares_identity,
            len(self.closure_tensors),
        )  # fmt: skip
        if self.autograd_is_remembered:
            of_objects = (-1,) * len(of_objects)
        return of_symbols, of_objects, len(self.other_hints)

    def is_followed_by(self, other: Assumptions) -> bool:
        """True if one of the assumptions has moved on, and none has moved back."""
        for mine, others in zip(self.steps[:2], other.steps[:2], strict=True):
            if any(now < before for before, now in zip(mine, others, strict=True)):
                return False
        return other.steps[:2] != self.steps[:2] or other.steps[2] > self.steps[2]


_OF_SYMBOLS = {"varying", "dims", "closure_numbers", "described_numbers", "fixed"}


class Retrace(AbandonedRun):
    """Internal: an assumption of a trace does not hold; trace the function again under others."""

    def __init__(self, assumptions: Assumptions) -> None:
        super().__init__(assumptions)
        self.assumptions = assumptions


def trace_until_valid(
    trace: Callable[[Assumptions], T],
    assumptions: Assumptions,
    after: Callable[[Assumptions, Exception], Assumptions | None] = lambda held, error: None,
) -> tuple[T, Assumptions]:
    """Trace until the assumptions hold; return the result and the assumptions.

    Args:
        trace: makes a trace; raises ``Retrace`` if an assumption does not hold.
        assumptions: those of the first trace.
        after: returns the assumptions after a trace that has failed; None raises the error.
    """
    while True:
        try:
            return trace(assumptions), assumptions
        except Retrace as retrace:
            following: Assumptions | None = retrace.assumptions
        except Exception as error:
            following = after(assumptions, assumptions.refusal or error)
            if following is None and assumptions.refusal is not None:
                raise assumptions.refusal from None
            if following is None:
                raise
        assert following is not None and assumptions.is_followed_by(following), following
        assumptions = following
