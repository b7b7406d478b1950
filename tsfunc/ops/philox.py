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
  (NOTE [courses of draws] in ``bridge/courses``);
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
        shared: whether all examples draw the same (``randomness="same"``); their results then
            have one row for all.
    """

    def __init__(
        self,
        level: BatchLevel,
        device: torch.device,
        generator: torch.Generator | None = None,
        shared: bool = False,
    ) -> None:
        self.device = device
        nonce = _nonce(generator)
        if shared:
            self.examples = torch.zeros(1, dtype=torch.int64, device=device)
        else:
            self.examples = level.examples(device)
            nonce = level.keys(nonce, generator)
        self.key = nonce.to(device).reshape(-1, 2).mT.unsqueeze(2)
        self._purpose = 0

    def stage(self, number: int) -> None:
        """What is drawn from here on does not depend on how often was drawn before."""
        self._purpose = number << 16

    def words(self, count: Any) -> Tensor:
        """``count`` random 32-bit words for each example, as int64; others at each call."""
        blocks = (count + 3) // 4
        rows = self.examples.shape[0]
        block = torch.arange(blocks, device=self.device).expand(rows, blocks)
        example = self.examples.view(-1, 1).expand(rows, blocks)
        even = torch.stack([block, example & _WORD])
        purpose = torch.full_like(example, self._purpose)
        odd = torch.stack([purpose, example >> 32])
        self._purpose += 1
        out = philox(even, odd, self.key)
        return out.reshape(rows, blocks * 4)[:, :count]


def _nonce(generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.randint(0, 1 << 32, (2,), device="cpu")
    return torch.randint(0, 1 << 32, (2,), device=generator.device, generator=generator)
