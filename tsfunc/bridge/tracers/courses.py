"""Random draws where some examples of a vmap draw without the others.

NOTE [courses of draws]
An example that draws as if alone (NOTE [draws of an example] in ``ops/philox``) is to meet the
first nonce at its first draw, the second at its second, whatever other examples draw in between.
While all examples run the same operators that is so by itself. Where control flow runs a part of
them (``subsets``), the others miss the nonces that are drawn there. From then on the nonces are
kept, and each example's key is the one that it would have met alone.

In a vmap inside of others a nonce is a number for each outer example, and outer examples that run
by themselves are drawn for without the others. So a course has a row for each of them: the nonces
that it has met, and how many of them each of its inner examples has used.

A nonce that comes again, as where a checkpoint runs a function once more, has the keys that it had.
A vmap whose parts are run one after the other begins each with the same state of the generator,
and so with the courses of the vmaps outside as they were (``generators``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.state import tls

if TYPE_CHECKING:
    from tsfunc.bridge.tracers.batch_tracer import BatchLevel


class Course:
    """The nonces of one generator since a part of the examples first ran by itself.

    Args:
        rows: how many examples the vmaps outside have, together.
        size: how many this one has.

    Attributes:
        met: how many nonces each row has met.
        used: how many of these each example has used, a row after the other.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.size = size
        self.met = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.used = torch.zeros(rows * size, dtype=torch.int64, device="cpu")
        self._nonces = torch.zeros(0, rows, 2, dtype=torch.int64, device="cpu")
        # Which nonces the examples had that drew together; None: the last one of each.
        self._drawn: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor] | None] = {}

    def keys(
        self, nonces: torch.Tensor, rows: torch.Tensor, inner: torch.Tensor
    ) -> torch.Tensor | None:
        """The key of each example that draws; None where the nonces are.

        Args:
            nonces: one for each of the rows.
            rows: the rows that draw.
            inner: which examples of each row do, by their numbers.
        """
        examples = rows[:, None] * self.size + inner
        known = tuple(nonces.flatten().tolist())
        if known not in self._drawn:
            self._drawn[known] = self._draw(nonces, rows, examples)
        drawn = self._drawn[known]
        if drawn is None:
            return None
        numbers = torch.zeros_like(self.used)
        numbers[drawn[0]] = drawn[1]
        return self._nonces[numbers[examples], rows[:, None]]

    def _draw(
        self, nonces: torch.Tensor, rows: torch.Tensor, examples: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        last = self.met[rows]
        if int(last.max()) == len(self._nonces):
            room = self._nonces.new_zeros(len(self._nonces) or 8, *self._nonces.shape[1:])
            self._nonces = torch.cat([self._nonces, room])
        self._nonces[last, rows] = nonces
        numbers = self.used[examples]
        self.met[rows] = last + 1
        self.used[examples] = numbers + 1
        return (examples, numbers) if bool((numbers != last[:, None]).any()) else None

    def start(self) -> CourseState:
        return CourseState(torch.zeros_like(self.met), torch.zeros_like(self.used), 0)

    def state(self) -> CourseState:
        return CourseState(self.met.clone(), self.used.clone(), len(self._drawn))

    def return_to(self, state: CourseState) -> None:
        """As it was: what was drawn since is about to be drawn anew, perhaps by other examples."""
        self.met, self.used = state.met.clone(), state.used.clone()
        for known in list(self._drawn)[state.drawn :]:
            del self._drawn[known]


class CourseState(NamedTuple):
    """How far the examples have come."""

    met: torch.Tensor
    used: torch.Tensor
    drawn: int

    def or_further(self, other: CourseState) -> CourseState:
        """How far each came in one of two runs."""
        return CourseState(
            self.met.maximum(other.met), self.used.maximum(other.used), max(self.drawn, other.drawn)
        )


Courses = dict[torch.Generator | None, Course]
CourseStates = dict[torch.Generator | None, CourseState]


def vmaps_here() -> list[BatchLevel]:
    """The active vmaps, with all of their examples or some."""
    found: list[Any] = [level for level in tls.state.levels if level.key is DispatchKey.Batch]
    return found


def outside_of(level: BatchLevel) -> list[BatchLevel]:
    """The active vmaps outside of a level."""
    return [outer for outer in vmaps_here() if outer.depth < level.depth]


def course_for(level: BatchLevel) -> Course:
    """A course for the examples of a call, at which none has drawn yet."""
    rows = math.prod(outer.whole.call_size for outer in outside_of(level))
    return Course(rows, level.call_size)


def keys_in(course: Course, level: BatchLevel, nonce: torch.Tensor) -> torch.Tensor:
    """The key of each example of a level, or one for all, of a nonce of outside of the level."""
    outer = outside_of(level)
    nonces = _laid_out(nonce, outer)
    if nonces is None:  # which is traced
        return nonce
    rows = torch.zeros((), dtype=torch.int64, device="cpu")
    for i, at in enumerate(outer):
        numbers = _laid_out(at.places(), outer[:i])
        assert numbers is not None
        rows = rows.unsqueeze(-1) * at.whole.call_size + numbers.cpu()
    inner = _laid_out(level.places(), outer)
    assert inner is not None
    count = inner.shape[-1]
    keys = course.keys(
        nonces.cpu().reshape(-1, 2), rows.reshape(-1), inner.cpu().reshape(-1, count)
    )
    if keys is None:
        return nonce
    keys = keys.to(nonce.device).reshape(*rows.shape, count, 2)
    for at in outer:
        keys = at.with_batch(keys)
    return keys


def _laid_out(value: Any, levels: Sequence[BatchLevel]) -> torch.Tensor | None:
    """What a tensor stands for, with a dim in front for each level; None where it has no data."""
    for level in reversed(levels):
        dim = None
        if isinstance(value, Tracer) and value.dispatch_level is level:
            value, dim = value.value, value.bdim  # type: ignore[attr-defined]
        if dim is None:
            value = value.unsqueeze(0).expand(level.batch_size, *value.shape)
        else:
            value = value.movedim(dim, 0)
        levels = levels[:-1]
    return None if isinstance(value, Tracer) else value
