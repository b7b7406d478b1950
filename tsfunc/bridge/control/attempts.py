"""Attempts to run a body on some of a vmap's examples, which may have to be given up."""

from __future__ import annotations

from types import TracebackType

from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.generators import Generators


class NeedsAll(BaseException):
    """Internal: a body that runs on lanes is given up, as it asks for the other examples' values.

    Who made the lanes runs it on all examples instead. No ``Exception``: the user's function is
    not to catch it.
    """

    def __init__(self, level: BatchLevel) -> None:
        super().__init__(f"{level.name} is needed whole (internal to tsfunc; should be caught)")
        self.level = level


class NotApart(NeedsAll):
    """Internal: a body can't be traced without a level (NOTE [levels set apart] in ``bodies``)."""


class Attempt:
    """Context manager: random numbers drawn in the block can be made undrawn.

    So what is done in place of an attempt that is given up draws the numbers that it would have
    drawn at once.
    """

    def __init__(self, level: BatchLevel) -> None:
        self._level = level
        self._before = level.generators
        # Where drawing is refused, nothing is drawn.
        self._generators = None if level.randomness == "error" else Generators(self._before)
        self._drawn = 0 if self._before is None else self._before.drawn

    def __enter__(self) -> Attempt:
        if self._generators is not None:
            self._level.generators = self._generators  # which lanes made in the block have too
        return self

    def give_up(self, error: NeedsAll) -> None:
        """What was drawn is undrawn, if it is this level that is needed whole; else raises."""
        if error.level is not self._level.root:
            raise error
        self.undo()

    def undo(self) -> None:
        if self._generators is not None:
            self._generators.rewind()
        if self._before is not None:
            self._before.drawn = self._drawn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._level.generators = self._before
