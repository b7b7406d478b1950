"""Random bits as a function of a key and a counter: Philox 4x32-10 in tensor operators.

NOTE [random numbers of an example]
With ``randomness="split"`` an example draws as if it ran alone. The numbers depend on the seed, on
its index in the batch, and on the number of draws it made before. The numbers of an example do not
depend on the other examples, or on how many examples run at a time. A vmapped call draws two 32-bit
words from torch's generator, one pair for the whole batch. This pair is the call's *key*, that of a
counter-based generator. The counter holds the index of the example (its lower 32 bits), the number
of draws that the example made before, the index of the number within the draw, and its purpose. The
construction has four consequences:

- ``torch.manual_seed`` and ``generator=`` work as they do without vmap;
- the chunks of a batch have the key of the whole call, so an example draws the same numbers in
  every chunk;
- if some examples run separately, each example goes on from its own number of draws, which is a
  value of the batch (NOTE [draws by example] in ``bridge/tracers/draw_keys``);
- an outer vmap draws the key by its own ``randomness``: one for each of its examples, or one
  for all. A trace records how the key is drawn.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.registry import RuleLevel

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(even: Tensor, odd: Tensor, key: Tensor) -> Tensor:
    """Run ten rounds on counters of four 32-bit words, each in an int64.

    Args:
        even: words 0 and 2 of the counters, stacked along dim 0.
        odd: words 1 and 3, stacked likewise; they can broadcast with ``even``.
        key: the two words of the key, stacked along dim 0.

    Returns:
        The four output words, as the last dim.

    Products wrap around modulo 2**64, and only their bits are used. ``odd`` and the key can have
    bits above the 32nd, which are masked after multiplication.
    """
    multipliers = _column(_MULTIPLIERS, even)
    step = _column(_WEYL, even)
    for _ in range(_ROUNDS):
        crossed = (even * multipliers).flip(0)
        even = ((crossed >> 32) ^ odd ^ key) & _WORD
        odd = crossed
        key = key + step
    odd = odd & _WORD
    return torch.stack([even[0], odd[0], even[1], odd[1]], -1)


def _column(words: Sequence[int], like: Tensor) -> Tensor:
    """Return two words stacked along dim 0, made by operators that a trace can record."""
    first, second = words
    pair = torch.arange(2, device=like.device) * (second - first) + first
    return pair.view(2, *[1] * (like.dim() - 1))


class Philox:
    """The random words of one call of a random operator, separate for each example.

    Args:
        level: the vmap, which has the key, and the index and the draws of each example.
        generator: the generator of the call, or None.
    """

    def __init__(
        self, level: RuleLevel, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self.device = device
        self.examples = level.example_indices(device)
        self._key = level.random_key(generator).to(device).view(2, 1, 1, 1)
        drawn = level.next_draw()
        # A column for the rows of the words.
        self._drawn = drawn.to(device).view(1, -1, 1) if isinstance(drawn, Tensor) else drawn
        self._used = 0

    def words(self, count: Any) -> Tensor:
        """Return ``count`` new random 32-bit words for each example, as int64."""
        self._used += 1
        return self._words(count, self._used - 1, 1, 0).squeeze(0)

    def attempts(self, stage: int, first: int, number: int) -> Attempts:
        """Return the words of ``number`` attempts, for numbers that are drawn by rejection.

        The words of an attempt depend on the stage and on its index, which starts at ``first``.
        """
        return Attempts(self, stage, first, number)

    def _words(self, count: Any, first: int, number: int, step: int) -> Tensor:
        """Return the words (purpose, example, word) of ``number`` purposes, ``step`` apart."""
        blocks = (count + 3) // 4
        rows = self.examples.shape[0]
        block = torch.arange(blocks, device=self.device).expand(1, rows, blocks)
        example = self.examples.view(1, -1, 1) & _WORD
        even = torch.stack([block, example.expand(1, rows, blocks)])
        purpose = torch.arange(number, device=self.device) * step + first
        drawn = torch.zeros_like(example) + self._drawn
        shape = number, rows, 1
        odd = torch.stack([purpose.view(-1, 1, 1).expand(shape), drawn.expand(shape)])
        out = philox(even, odd, self._key)
        return out.reshape(number, rows, blocks * 4).narrow(-1, 0, count)


class Attempts:
    """The random words of several attempts, which are the first dim.

    Attributes:
        examples: the indices of the examples, as in ``Philox``.
        device: the device of the words.
    """

    def __init__(self, draw: Philox, stage: int, first: int, number: int) -> None:
        self.draw, self.number = draw, number
        self.examples, self.device = draw.examples, draw.device
        self._next = (stage << 16) + (first << 4)

    def words(self, count: Any) -> Tensor:
        """Return ``count`` new words for each attempt and example; up to 16 calls are possible."""
        self._next += 1
        return self.draw._words(count, self._next - 1, self.number, 1 << 4)
