"""The states of torch's random generators, for a vmapped call that runs in parts.

NOTE [random numbers in chunks]
With ``randomness="same"`` or ``"split"`` each part of the batch must start with the generator
state of the first part. The states of the default generators are saved when the call begins. The
state of a generator that the function names (``generator=``) is saved before its first draw. After
the call, the generators keep the state of the part with the most draws, so that later draws get
unused numbers.
"""

from __future__ import annotations

import torch

from tsfunc.bridge.tracers.rng_streams import RngStreamStates, vmaps_here


class GeneratorStates:
    """The generator states at the start of a vmapped call, or of an attempt.

    Args:
        outside: an outer instance that is told of the draws too.
    """

    def __init__(self, outside: GeneratorStates | None = None) -> None:
        self._outside = outside
        self._streams = _Streams()
        self.drawn = 0
        self._most = -1
        self._began: list[tuple[torch.Generator, torch.Tensor]] = []
        self._ended: list[tuple[torch.Generator, torch.Tensor]] = []
        defaults = [torch.default_generator]
        if torch.cuda.is_initialized():
            defaults += torch.cuda.default_generators
        for generator in defaults:
            self._began.append((generator, generator.get_state()))

    def draws(self, generator: torch.Generator | None) -> None:
        """Note that a random operator will draw."""
        if self._outside is not None:
            self._outside.draws(generator)
        self.drawn += 1
        if generator is not None and all(known is not generator for known, _ in self._began):
            self._began.append((generator, generator.get_state()))

    def rewind(self) -> None:
        """Restore the initial states, between two parts of the batch."""
        self._note_end()
        self._streams.rewind()
        for generator, state in self._began:
            generator.set_state(state)

    def finish(self) -> None:
        """Set the final states, after all parts."""
        self._note_end()
        self._streams.finish()
        for generator, state in self._ended:
            generator.set_state(state)

    def _note_end(self) -> None:
        self._streams.note_end()
        if self.drawn > self._most:
            self._most = self.drawn
            self._ended = [(generator, generator.get_state()) for generator, _ in self._began]
        self.drawn = 0


class _Streams:
    """The progress of examples of outer vmaps, which draw in each part of the call."""

    def __init__(self) -> None:
        self._levels = [level.whole for level in vmaps_here()]
        self._began = self._states()
        self._ended = self._began

    def _states(self) -> list[RngStreamStates]:
        return [
            {generator: stream.state() for generator, stream in (level.rng_streams or {}).items()}
            for level in self._levels
        ]

    def note_end(self) -> None:
        """Keep the largest progress of each example over the parts."""
        self._ended = [
            {g: then[g].or_further(state) if g in then else state for g, state in now.items()}
            | {g: state for g, state in then.items() if g not in now}
            for then, now in zip(self._ended, self._states(), strict=True)
        ]

    def rewind(self) -> None:
        for level, began in zip(self._levels, self._began, strict=True):
            for generator, stream in (level.rng_streams or {}).items():
                stream.return_to(began.get(generator) or stream.start())

    def finish(self) -> None:
        for level, ended in zip(self._levels, self._ended, strict=True):
            for generator, state in ended.items():
                assert level.rng_streams is not None
                level.rng_streams[generator].return_to(state)


def rewindable(randomness: str) -> GeneratorStates | None:
    """Return the generators that a call in parts needs for this randomness, or None."""
    return GeneratorStates() if randomness in ("same", "split") else None
