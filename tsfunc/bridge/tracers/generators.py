"""The states of torch's random number generators, for a vmapped call that is run part by part.

NOTE [the same numbers in every part]
With ``randomness="same"`` or ``"split"`` a part of the batch that is run later is to begin with
the state that the first part began with. So the states of the default generators are taken where
the call begins, and that of a generator which the function names (``generator=``) where it is first
drawn from. After the call they are left as the part left them that drew the most, so that numbers
drawn later have not been used.
"""

from __future__ import annotations

import torch

from tsfunc.bridge.tracers.courses import CourseStates, vmaps_here


class Generators:
    """Remembers where generators were when a vmapped call, or an attempt, began.

    Args:
        outside: what is told of draws too.
    """

    def __init__(self, outside: Generators | None = None) -> None:
        self._outside = outside
        self._courses = _Courses()
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
        """A random operator is about to draw."""
        if self._outside is not None:
            self._outside.draws(generator)
        self.drawn += 1
        if generator is not None and all(known is not generator for known, _ in self._began):
            self._began.append((generator, generator.get_state()))

    def rewind(self) -> None:
        """A part of the batch has been run, and another one is about to be."""
        self._note_end()
        self._courses.rewind()
        for generator, state in self._began:
            generator.set_state(state)

    def finish(self) -> None:
        """All parts have been run."""
        self._note_end()
        self._courses.finish()
        for generator, state in self._ended:
            generator.set_state(state)

    def _note_end(self) -> None:
        self._courses.note_end()
        if self.drawn > self._most:
            self._most = self.drawn
            self._ended = [(generator, generator.get_state()) for generator, _ in self._began]
        self.drawn = 0


class _Courses:
    """How far examples of the active vmaps have come, which draw for each part of the call."""

    def __init__(self) -> None:
        self._levels = [level.whole for level in vmaps_here()]
        self._began = self._states()
        self._ended = self._began

    def _states(self) -> list[CourseStates]:
        return [
            {generator: course.state() for generator, course in (level.courses or {}).items()}
            for level in self._levels
        ]

    def note_end(self) -> None:
        """Of what each has drawn in one of the parts, the most is what it has drawn in the end."""
        self._ended = [
            {g: then[g].or_further(state) if g in then else state for g, state in now.items()}
            | {g: state for g, state in then.items() if g not in now}
            for then, now in zip(self._ended, self._states(), strict=True)
        ]

    def rewind(self) -> None:
        for level, began in zip(self._levels, self._began, strict=True):
            for generator, course in (level.courses or {}).items():
                course.return_to(began.get(generator) or course.start())

    def finish(self) -> None:
        for level, ended in zip(self._levels, self._ended, strict=True):
            for generator, state in ended.items():
                assert level.courses is not None
                level.courses[generator].return_to(state)


def rewindable(randomness: str) -> Generators | None:
    """What a call that is run part by part needs for this randomness."""
    return Generators() if randomness in ("same", "split") else None
