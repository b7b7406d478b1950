"""Batched keyword arguments, which few operators have.

NOTE [batched keywords]
``dims`` has an entry for each of ``args``. In a call in which tensors given by keyword are
batched too, one entry follows: a dict from their names to where their batch dims lie. Only rules
named in ``KEYWORDS`` are called so; each says which keywords it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsfunc.ops.registry import Dims

KEYWORDS: dict[str, frozenset[str]] = {}


def takes_keywords(names: Sequence[str], *keywords: str) -> None:
    """Declares that the rules of operators cover batched keyword arguments."""
    for name in names:
        KEYWORDS[name] = frozenset(keywords)


def keyword_dim(dims: Dims, args: Sequence[Any], keyword: str) -> int | None:
    """Where the batch dim of a keyword argument lies, or None."""
    if len(dims) <= len(args):
        return None
    found: int | None = dims[len(args)].get(keyword)
    return found
