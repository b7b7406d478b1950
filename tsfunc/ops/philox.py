"""Random bits that are a function of a key and a counter: Philox 4x32-10, by tensor operators.

NOTE [draws of an example]
With ``randomness="split"`` an example draws as if it ran alone: its numbers depend on the seed, on
its index in the batch, and on how many draws it made before; not on the other examples, nor on how
many are run at a time. Each random operator draws two 32-bit words from torch's generator, one
pair for the whole batch: the *nonce*, which is the key of a counter-based generator. The counter
holds the index of the example, which of the draw's numbers it is, and what for. So

- ``torch.manual_seed``, ``generator=`` and what saves and restores a generator's state, such as
  ``torch.utils.checkpoint``, hold as they do without a vmap;
- parts of a batch that are run one after the other begin with the same state of the generator,
  and an example meets the same nonces in whichever part it is;
- where some examples run by themselves, each meets its nonces in their order all the same
  (NOTE [courses of draws] in ``bridge/tracers/courses``);
- a vmap outside of this one makes the nonce itself, by its own ``randomness``: a number for each
  of its examples, or one for all. A trace records how the nonce is drawn.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.registry import BatchLevel

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(even: Tensor, odd: Tensor, key: Tensor) -> Tensor:
    """Ten rounds on counters of four 32-bit words, each in an int64.

    Args:
        even: words 0 and 2 of the counters, stacked in front.
        odd: words 1 and 3, stacked likewise; they may broadcast with ``even``.
        key: the two words of the key, stacked in front.

    Returns:
        The four words that come out, as a last dim.

    Products wrap around modulo 2**64, of which only bits are looked at. ``odd`` and the key may
    have bits above the 32nd; they are masked where they are multiplied.
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
    """Two words, stacked in front; made by operators, which a trace records."""
    first, second = words
    pair = torch.arange(2, device=like.device) * (second - first) + first
    return pair.view(2, *[1] * (like.dim() - 1))


class Draw:
    """What one call of a random operator draws, for each example its own.

    Args:
        level: the vmap, which knows the index of each example.
        device: where the numbers are needed.
        generator: the one that the call was given, or None.
    """

    def __init__(
        self,
        level: BatchLevel,
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> None:
        self.device = device
        self.examples = level.examples(device)
        self._key = (
            level.keys(_nonce(generator), generator).to(device).reshape(-1, 2).mT[:, None, :, None]
        )
        self._used = 0

    def words(self, count: Any) -> Tensor:
        """``count`` random 32-bit words for each example, as int64; others at each call."""
        self._used += 1
        return self._words(count, self._used - 1, 1, 0).squeeze(0)

    def attempts(self, stage: int, first: int, number: int) -> Attempts:
        """For numbers that are drawn again and again until they will do.

        Which words an attempt has follows from its stage and its own number, from ``first`` on.
        """
        return Attempts(self, stage, first, number)

    def _words(self, count: Any, first: int, number: int, step: int) -> Tensor:
        """The words (purpose, example, word) of ``number`` purposes, ``step`` apart."""
        blocks = (count + 3) // 4
        rows = self.examples.shape[0]
        block = torch.arange(blocks, device=self.device).expand(1, rows, blocks)
        example = self.examples.view(1, -1, 1)
        even = torch.stack([block, (example & _WORD).expand(1, rows, blocks)])
        purpose = torch.arange(number, device=self.device) * step + first
        shape = number, rows, 1
        odd = torch.stack([purpose.view(-1, 1, 1).expand(shape), (example >> 32).expand(shape)])
        out = philox(even, odd, self._key)
        return out.reshape(number, rows, blocks * 4)[..., :count]


class Attempts:
    """Words for several attempts at a time, which are their first dim.

    Attributes:
        examples: as those of the draw.
        device: where the words are.
    """

    def __init__(self, draw: Draw, stage: int, first: int, number: int) -> None:
        self.draw, self.number = draw, number
        self.examples, self.device = draw.examples, draw.device
        self._next = (stage << 16) + (first << 4)

    def words(self, count: Any) -> Tensor:
        """``count`` words for each attempt and example; others at each call, up to 16."""
        self._next += 1
        return self.draw._words(count, self._next - 1, self.number, 1 << 4)


def _nonce(generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.randint(0, 1 << 32, (2,), device="cpu")
    return torch.randint(0, 1 << 32, (2,), device=generator.device, generator=generator)
