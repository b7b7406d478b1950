"""Prefixes of an associative function, in a logarithmic number of combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Combine = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def prefixes(
    combine: Combine, leaves: Sequence[torch.Tensor], axes: Sequence[int], size: int
) -> Sequence[torch.Tensor]:
    """Return the prefixes: combine pairs, recurse, and fill in the slices between."""
    if size < 2:
        return leaves

    def every(parts: Sequence[torch.Tensor], start: int, stop: int, step: int) -> list[Any]:
        return [
            part[(slice(None),) * at + (slice(start, stop, step),)]
            for part, at in zip(parts, axes, strict=True)
        ]

    pairs = combine(every(leaves, 0, size - 1, 2), every(leaves, 1, size, 2))
    odd = prefixes(combine, pairs, axes, size // 2)
    first = every(leaves, 0, 1, 1)
    if size > 2:
        before = every(odd, 0, (size - 1) // 2, 1)
        rest = combine(before, every(leaves, 2, size, 2))
        even = [torch.cat(two, at) for *two, at in zip(first, rest, axes, strict=True)]
    else:
        even = first
    return [_interleave(a, b, at, size) for a, b, at in zip(even, odd, axes, strict=True)]


def _interleave(even: torch.Tensor, odd: torch.Tensor, at: int, size: int) -> torch.Tensor:
    """Return the entries of two tensors in turn along a dim; the first may have one more."""
    count = size // 2
    both = torch.stack([even.narrow(at, 0, count), odd], at + 1).flatten(at, at + 1)
    return both if size % 2 == 0 else torch.cat([both, even.narrow(at, count, 1)], at)
