"""The states of torch's random generators, for a vmapped call that runs in parts.

NOTE [random numbers in chunks]
With ``randomness="same"`` each part of the batch must start with the generator state of the first
part. Outer examples that draw as if alone must start with their numbers of draws (NOTE [draws by
example] in ``draw_keys``). The states of the default generators are saved when the call begins. The
state of a generator that the function names (``generator=``) is saved before its first draw. After
the call, the generators keep the state of the part with the most draws, so that later draws get
unused numbers.
"""

from __future__ import annotations

import torch

from tsfunc.bridge.tracers.draw_keys import DrawCountSnapshot, draws_are_counted


class GeneratorStates:
    """The generator states at the start of a vmapped call, or of an attempt.

    Args:
        outside: an outer instance that is told of the draws too.
        always: True to save the states even where only keys are drawn, which are drawn once
            (NOTE [draws by example]): inside of a vmap whose examples draw as if alone.
    """

    def __init__(self, outside: GeneratorStates | None = None, always: bool = False) -> None:
        self._outside = outside
        self._saves = always or not draws_are_counted()
        self._counts = self._counts_ended = DrawCountSnapshot()
        self.draw_count = 0
        self._most = -1
        self._began: list[tuple[torch.Generator, torch.Tensor]] = []
        self._ended: list[tuple[torch.Generator, torch.Tensor]] = []
        defaults = [torch.default_generator]
        if torch.cuda.is_initialized():
            defaults += torch.cuda.default_generators
        for generator in defaults if self._saves else ():
            self._began.append((generator, generator.get_state()))

    def on_random_op(self, generator: torch.Generator | None) -> None:
        """Note that a random operator will draw."""
        if self._outside is not None:
            self._outside.on_random_op(generator)
        self.draw_count += 1
        if generator is None or not self._saves:
            return
        if all(begun is not generator for begun, _ in self._began):
            self._began.append((generator, generator.get_state()))

    def rewind(self) -> None:
        """Restore the initial states, between two parts of the batch."""
        self._note_end()
        self._counts.restore()
        for generator, state in self._began:
            generator.set_state(state)

    def finish(self) -> None:
        """Set the final states, after all parts."""
        self._note_end()
        self._counts_ended.restore()
        for generator, state in self._ended:
            generator.set_state(state)

    def _note_end(self) -> None:
        self._counts_ended = self._counts.current().maximum(self._counts_ended)
        if self.draw_count > self._most:
            self._most = self.draw_count
            self._ended = [(generator, generator.get_state()) for generator, _ in self._began]
        self.draw_count = 0


class NoGeneratorStates(GeneratorStates):
    """Stands for the states where they can't be restored, as in a trace: a draw is an error."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def on_random_op(self, generator: torch.Generator | None) -> None:
        """Raise the error.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(self._message)

    def rewind(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def generator_states_for(randomness: str) -> GeneratorStates | None:
    """Return the generators that a call in parts needs for this randomness, or None."""
    return GeneratorStates() if randomness == "same" else None
