"""Batched keyword arguments, which few operators have.

NOTE [batched keywords]
``bdims`` has an entry for each of ``args``. If a call has batched tensors as keyword arguments, one
entry follows: a dict from their names to their batch dims. Only the rules of operators in
``KEYWORDS`` get such calls; each declares the keywords that it accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsfunc.ops.registry import BatchDims

KEYWORDS: dict[str, frozenset[str]] = {}


def takes_keywords(names: Sequence[str], *keywords: str) -> None:
    """Declare that the rules of operators accept batched keyword arguments."""
    for name in names:
        KEYWORDS[name] = frozenset(keywords)


def keyword_bdim(bdims: BatchDims, args: Sequence[Any], keyword: str) -> int | None:
    """Return the batch dim of a keyword argument, or None."""
    if len(bdims) <= len(args):
        return None
    return bdims[len(args)].get(keyword)
