"""Random draws of a vmap whose examples do not all run together.

NOTE [random streams]
An example that draws as if alone (NOTE [random numbers of an example] in ``ops/philox``) must get
the first nonce at its first draw and the second nonce at its second draw, whatever other examples
draw in between. While all examples run the same operators, this holds by itself. If control flow
runs a subset of them (``subsets``), the other examples miss the nonces of that run. From then on
the nonces are stored, and each example's key is the one that it would have got alone.

Inside other vmaps a nonce is one number per outer example, and outer examples that run separately
draw without the others. A stream therefore has a row for each outer example: the nonces of the
row, and the number of them that each inner example has used.

A repeated nonce, as in the rerun of a checkpoint, gives the same keys again. A vmap that runs in
parts starts each part with the same state of the generator, and so with the same state of the
streams of outer vmaps (``generators``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.state import tls


class RngStream:
    """The nonces of one generator since some examples first ran separately.

    Args:
        rows: the number of examples of all outer vmaps together.
        size: the number of examples of this vmap.

    Attributes:
        met: the number of nonces of each row, int64 of shape (rows,).
        used: the number of nonces that each example has used, row by row, int64 of shape (rows *
            size,).
    """

    def __init__(self, rows: int, size: int) -> None:
        self.size = size
        self.met = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.used = torch.zeros(rows * size, dtype=torch.int64, device="cpu")
        self._nonces = torch.zeros(0, rows, 2, dtype=torch.int64, device="cpu")
        # The nonce indices of examples that drew together; None: each used the last one of its
        # row.
        self._drawn: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor] | None] = {}

    def keys(
        self, nonces: torch.Tensor, rows: torch.Tensor, inner: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the key of each drawing example; None if the keys are the nonces.

        Args:
            nonces: one nonce per row.
            rows: the rows that draw.
            inner: the positions of the drawing examples in each row.
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

    def start(self) -> RngStreamState:
        return RngStreamState(torch.zeros_like(self.met), torch.zeros_like(self.used), 0)

    def state(self) -> RngStreamState:
        return RngStreamState(self.met.clone(), self.used.clone(), len(self._drawn))

    def return_to(self, state: RngStreamState) -> None:
        """Restore a state: draws since then will be repeated, perhaps by other examples."""
        self.met, self.used = state.met.clone(), state.used.clone()
        for known in list(self._drawn)[state.drawn :]:
            del self._drawn[known]


class RngStreamState(NamedTuple):
    """The progress of the examples of a stream."""

    met: torch.Tensor
    used: torch.Tensor
    drawn: int

    def or_further(self, other: RngStreamState) -> RngStreamState:
        """Return the further progress of each example in two runs."""
        return RngStreamState(
            self.met.maximum(other.met), self.used.maximum(other.used), max(self.drawn, other.drawn)
        )


RngStreams = dict[torch.Generator | None, RngStream]
RngStreamStates = dict[torch.Generator | None, RngStreamState]


class DrawingLevel(Protocol):
    """The part of a vmap level that its draws depend on; ``BatchLevel`` has its description."""

    depth: int
    batch_size: int
    rng_streams: RngStreams | None

    @property
    def call_size(self) -> int: ...

    @property
    def whole(self) -> DrawingLevel: ...

    def places(self) -> torch.Tensor: ...

    def with_batch(self, value: torch.Tensor, /) -> torch.Tensor: ...


def vmaps_here() -> list[DrawingLevel]:
    """Return the active vmap levels, including those with some of their examples."""
    found: list[Any] = [level for level in tls.state.levels if level.key is DispatchKey.Batch]
    return found


def outside_of(level: DrawingLevel) -> list[DrawingLevel]:
    """Return the active vmap levels outside of a level."""
    return [outer for outer in vmaps_here() if outer.depth < level.depth]


def stream_for(level: DrawingLevel) -> RngStream:
    """Return a new stream for the examples of a call."""
    rows = math.prod(outer.whole.call_size for outer in outside_of(level))
    return RngStream(rows, level.call_size)


def keys_in(stream: RngStream, level: DrawingLevel, nonce: torch.Tensor) -> torch.Tensor:
    """Return one key per example of a level, or one for all, from a nonce from outside it."""
    outer = outside_of(level)
    nonces = _laid_out(nonce, outer)
    if nonces is None:  # the nonce is traced
        return nonce
    rows = torch.zeros((), dtype=torch.int64, device="cpu")
    for i, at in enumerate(outer):
        numbers = _laid_out(at.places(), outer[:i])
        assert numbers is not None
        rows = rows.unsqueeze(-1) * at.whole.call_size + numbers.cpu()
    inner = _laid_out(level.places(), outer)
    assert inner is not None
    count = inner.shape[-1]
    keys = stream.keys(
        nonces.cpu().reshape(-1, 2), rows.reshape(-1), inner.cpu().reshape(-1, count)
    )
    if keys is None:
        return nonce
    keys = keys.to(nonce.device).reshape(*rows.shape, count, 2)
    for at in outer:
        keys = at.with_batch(keys)
    return keys


def _laid_out(value: Any, levels: Sequence[Any]) -> torch.Tensor | None:
    """Return the physical value with one front dim per level; None if it has no data."""
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
