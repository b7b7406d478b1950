"""The limit of the reference's work, which does not depend on the speed of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

MOST = 300_000  # operators, which take about six seconds


class TooMuchWorkError(Exception):
    """The reference would take too long: the program is not compared."""


_ends: list[int] = []


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit the number of operators that autograd records in this thread.

    The interpreter records every operator that a derivative depends on, those of derivatives
    included. Operators of a tower multiply by its derivatives, so the others are few beside them.
    """
    _ends.append(torch._C._autograd._get_sequence_nr() + MOST)
    try:
        yield
    finally:
        _ends.pop()


def check() -> None:
    """Raise an error beyond the limit; each example and each pullback checks."""
    if _ends and torch._C._autograd._get_sequence_nr() > _ends[-1]:
        raise TooMuchWorkError("more operators than the reference may run")
