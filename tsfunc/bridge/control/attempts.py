"""Attempts to run a body on an active subset, which may have to be given up."""

from __future__ import annotations

from types import TracebackType

from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.draw_keys import DrawCountSnapshot
from tsfunc.bridge.tracers.generators import GeneratorStates
from tsfunc.user_code import AbandonedRun


class NeedsWholeBatch(AbandonedRun):
    """Internal: a body that runs on a subset needs values of the other examples.

    The code that selected the subset runs the body on all examples instead.
    """

    def __init__(self, level: BatchLevel) -> None:
        super().__init__(f"{level.name} is needed whole (internal to tsfunc; should be caught)")
        self.level = level


class CannotUnbatch(NeedsWholeBatch):
    """Internal: a body can't be traced for one example (NOTE [hidden vmaps] in ``bodies``)."""


class Attempt:
    """Context manager: the random numbers drawn in the block can be rewound.

    The run that replaces a failed attempt then draws the same numbers as a first run would.
    """

    def __init__(self, level: BatchLevel) -> None:
        self._level = level
        self._before = level.generators
        # With randomness="error" nothing is drawn.
        self._generators = None if level.randomness == "error" else GeneratorStates(self._before)
        self._drawn = 0 if self._before is None else self._before.draw_count
        self._counts = DrawCountSnapshot()

    def __enter__(self) -> Attempt:
        if self._generators is not None:
            self._level.generators = self._generators  # subsets made in the block have it too
        return self

    def give_up(self, error: NeedsWholeBatch) -> None:
        """Rewind the random numbers if this level is the one that is needed whole; else raise."""
        if error.level is not self._level.root:
            raise error
        self.undo()

    def undo(self) -> None:
        self._counts.restore()
        if self._generators is not None:
            self._generators.rewind()
        if self._before is not None:
            self._before.draw_count = self._drawn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._level.generators = self._before
