"""The keys of a vmapped call, and the number of draws that each of its examples has made.

NOTE [draws by example]
An example that draws as if alone (NOTE [random numbers of an example] in ``ops/philox``) has the
key of its vmapped call, its index in the call, and the number of draws that it has made before. The
key is one draw of torch's generator at the entry of the call, needed or not: an outer vmap draws it
by its own ``randomness``, and a trace records it. If it is refused there, by an outer vmap with
``randomness="error"``, the first random operator raises the error. A generator that the function
names (``generator=``) gives a key of its own at its first use, by the levels of the entry.

``BatchLevel.draw_count`` is an int while all examples have drawn equally often,
else a tensor of the level. Code at the level counts up. Code that runs a body for some of the
examples treats the number like any other value of the body: it selects and merges it (active
subsets), carries it (loops), returns it (branches), and restores it before a body runs again
(checkpoints, pullbacks, chunks). ``draw_counts`` and ``set_draw_counts`` read and write the numbers
of all levels of the running code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.state import Level, tls, using


class _Vmap(Protocol):
    """The level of a vmap whose examples draw as if alone."""

    depth: int
    draw_count: Any
    random_keys: Any


# The number of draws of each level's examples, by the level's depth.
DrawCounts = dict[int, Any]


def as_seen_by_kernel(value: Any) -> Any:
    """Return a value that is not an argument of the running kernel as the kernel must see it.

    The kernel's levels are those that its own level captured, without the body that is traced.
    """
    value = as_seen_by_current_level(value)
    for level in tls.state.levels:
        if bodies := getattr(level, "bodies", None):
            value = bodies[-1].remap(value)
    return value


class CallKeys:
    """The keys of one vmapped call, one for each generator: see NOTE [draws by example].

    The chunks, parts and subsets of a call share them.

    Args:
        without: active levels that the draw of a key does not reach.
    """

    __slots__ = ("_captured", "_drawn_at_entry", "_keys", "_outer", "_state", "refused")

    def __init__(self, without: Sequence[Level] = ()) -> None:
        state = tls.state
        if without:
            state = state.replace(levels=tuple([x for x in state.levels if x not in without]))
        self._state = state
        self._captured = [(x, x.outer, x.inner) for x in state.levels]
        self._keys: dict[torch.Generator | None, torch.Tensor] = {}
        outer = _counting_levels(state.levels)
        self._outer = outer[-1] if outer else None
        self._drawn_at_entry = None if self._outer is None else self._outer.draw_count
        self.refused = _refuse_draws(state.levels)
        if not self.refused:
            with using(state):
                self._keys[None] = _draw(None)

    def key(self, generator: torch.Generator | None) -> torch.Tensor:
        """Return two 32-bit words from a generator (None: torch's own), of the outer levels."""
        key = self._keys.get(generator)
        if key is None:
            with self._at_entry():
                key = self._keys[generator] = _draw(generator)
        return key

    @contextmanager
    def _at_entry(self) -> Iterator[None]:
        """Context manager: the levels, and the outer examples' draws, are those at the entry."""
        outer = self._outer
        draw_count = None if outer is None else outer.draw_count
        bodies = [x.bodies for x in self._state.levels if hasattr(x, "bodies")]
        running = [list(active) for active in bodies]
        now = [(x, x.outer, x.inner) for x, _, _ in self._captured]
        try:
            _capture(self._captured)
            for active in bodies:  # factories are recorded in the innermost body
                active[:] = [body for body in active if body in self._state.levels]
            if outer is not None:
                outer.draw_count = self._drawn_at_entry
            with using(self._state):
                yield
        finally:
            _capture(now)
            for active, before in zip(bodies, running, strict=True):
                active[:] = before
            if outer is not None:
                outer.draw_count = draw_count


def _draw(generator: torch.Generator | None) -> torch.Tensor:
    device = "cpu" if generator is None else generator.device
    return torch.randint(0, 1 << 32, (2,), generator=generator, device=device)


def _refuse_draws(levels: Sequence[Level]) -> bool:
    """True if a draw that reaches these levels raises an error."""
    for level in reversed(levels):
        randomness = getattr(level, "randomness", None)
        if randomness == "error" or level.forbids_random:
            return True
        if randomness == "split":
            return bool(level.random_keys.refused)  # type: ignore[attr-defined]
    return False


def _capture(states: Sequence[tuple[Level, Any, Any]]) -> None:
    for level, outer, inner in states:
        if level.outer is not outer:
            level.replace_states(outer, inner)


def _counting_levels(levels: Sequence[Level], first: int = 0) -> list[_Vmap]:
    """Return the vmaps among some levels whose examples draw as if alone, from a depth on."""
    counting: list[Any] = [
        level
        for level in levels
        if level.key is DispatchKey.Batch and level.depth >= first and level.randomness == "split"  # type: ignore[attr-defined]
    ]
    return counting


def draws_are_counted() -> bool:
    """True if examples of an active vmap draw as if alone."""
    return bool(_counting_levels(tls.state.levels))


def draw_counts(first: int = 0) -> DrawCounts:
    """Return the number of draws of the examples of each active vmap of this depth or deeper."""
    return {
        level.depth: as_seen_by_current_level(level.draw_count)
        for level in _counting_levels(tls.state.levels, first)
    }


def set_draw_counts(counts: DrawCounts) -> None:
    """Set the number of draws of the examples of active vmaps."""
    for level in _counting_levels(tls.state.levels):
        if level.depth in counts:
            level.draw_count = _count_at_level(level, counts[level.depth])


def packed_draw_counts() -> torch.Tensor:
    """Return the numbers of draws at all active levels as one tensor, the outermost first."""
    counts = [torch.as_tensor(drawn) for drawn in draw_counts().values()]
    return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64)


def set_packed_draw_counts(packed: torch.Tensor) -> None:
    """Set the numbers of draws to those of ``packed_draw_counts``, at the same levels."""
    depths = [level.depth for level in _counting_levels(tls.state.levels)]
    if depths:
        set_draw_counts(dict(zip(depths, packed.unbind(), strict=True)))


def _count_at_level(level: _Vmap, count: Any) -> Any:
    """Return a count as a value of its level: the examples of inner levels have equal ones."""
    while isinstance(count, Tracer) and count.dispatch_level.depth > level.depth:
        value, dim = count.value, getattr(count, "bdim", None)  # type: ignore[attr-defined]
        with count.dispatch_level.restored():
            count = value if dim is None else value.select(dim, 0)
    return count


@contextmanager
def preserve_draw_counts(first: int = 0) -> Iterator[None]:
    """Context manager: restore the numbers of draws after the block.

    The numbers of vmaps outside of the depth ``first`` go on, since all of their examples are in
    it.
    """
    before = DrawCountSnapshot(_counting_levels(tls.state.levels, first))
    try:
        yield
    finally:
        before.restore()


def merge_draw_counts(
    counts: Sequence[DrawCounts], combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> None:
    """Set the numbers of draws to those after one of several bodies, for each example."""
    merged: DrawCounts = {}
    for depth, first in counts[0].items():
        column = [of_body[depth] for of_body in counts]
        same = all(isinstance(count, int) and count == first for count in column)
        merged[depth] = first if same else combine([torch.as_tensor(count) for count in column])
    set_draw_counts(merged)


def count_draws(func: Callable[..., Any], first: int = 0) -> Callable[..., tuple[Any, DrawCounts]]:
    """Return a function that also returns the numbers of draws after its call.

    The caller sets them, if the call is what happens to all examples.
    """

    def run(*args: Any) -> tuple[Any, DrawCounts]:
        with preserve_draw_counts(first):
            out = func(*args)
            return out, draw_counts(first)

    return run


class DrawCountSnapshot:
    """The numbers of draws at some time, for code that runs again from there."""

    def __init__(self, levels: Sequence[_Vmap] | None = None) -> None:
        levels = _counting_levels(tls.state.levels) if levels is None else levels
        self._counts = [(level, level.draw_count) for level in levels]

    def current(self) -> DrawCountSnapshot:
        """Return the present numbers of draws at the same levels."""
        return DrawCountSnapshot([level for level, _ in self._counts])

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context manager: the block draws from that time on; restore the numbers after it."""
        now = self.current()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Set the numbers of draws to those of that time."""
        for level, draw_count in self._counts:
            level.draw_count = draw_count

    def is_current(self) -> bool:
        """True if no number of draws has changed since that time."""
        return all(level.draw_count is drawn for level, drawn in self._counts)

    def maximum(self, other: DrawCountSnapshot) -> DrawCountSnapshot:
        """Return the larger number of draws of each example, of two times at the same levels."""
        further = DrawCountSnapshot(())
        further._counts = [
            (level, _larger(a, b))
            for (level, a), (_, b) in zip(self._counts, other._counts, strict=True)
        ]
        return further


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
