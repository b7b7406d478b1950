"""Random draws where some examples of a vmap draw without the others.

NOTE [courses of draws]
An example that draws as if alone (NOTE [draws of an example] in ``ops/philox``) is to meet the
first nonce at its first draw, the second at its second, whatever other examples draw in between.
While all examples run the same operators that is so by itself. Where control flow runs a part of
them (``lanes``), the others miss the nonces that are drawn there. From then on the nonces are kept,
and each example's key is the one that it would have met alone.

A nonce that comes again, as where a checkpoint runs a function once more, has the keys that it had.

It is so for the outermost vmap. In one inside of it a nonce is a number for each outer example,
which have courses of their own: there, after a part of the examples has drawn by itself, the others
go on with nonces that are as random, but depend on how often that part drew.
"""

from __future__ import annotations

import torch

from tsfunc.bridge.tracer import Tracer


class Course:
    """The nonces of one generator since a part of the examples first ran by itself.

    Attributes:
        missed: how many of them each example has missed.
    """

    def __init__(self, size: int) -> None:
        self.missed = torch.zeros(size, dtype=torch.int64, device="cpu")
        self._nonces: list[torch.Tensor] = []
        self._keys: dict[bytes, torch.Tensor] = {}

    def keys(self, nonce: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """The key of each example that draws: some of them by their numbers, or all."""
        if isinstance(nonce, Tracer):
            return nonce
        known = bytes(nonce.cpu().numpy().tobytes())
        if known in self._keys:
            return self._keys[known]
        self._nonces.append(nonce)
        missed = self.missed
        if index is not None:
            index = index.cpu()
            missed = missed[index]
            self.missed = self.missed + 1
            self.missed[index] = missed
        keys = nonce
        if bool(missed.any()):
            most = int(missed.max())
            recent = torch.stack(self._nonces[-1 - most :])
            keys = recent.index_select(0, most - missed)
        self._keys[known] = keys
        return keys

    def narrow(self, kept: torch.Tensor) -> None:
        """Only some of the examples go on."""
        size = len(self.missed)
        self.missed = self.missed[kept]
        for known, keys in self._keys.items():
            if keys.dim() == 2 and keys.shape[0] == size:
                self._keys[known] = keys.index_select(0, kept)


Courses = dict[torch.Generator | None, Course]
