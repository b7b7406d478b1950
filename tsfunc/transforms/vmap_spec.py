"""What the parts of ``vmap`` share: its arguments, and prefixes of dims."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree

InDims = Any
OutDims = Any


@dataclass(frozen=True)
class Spec:
    """The arguments of ``vmap`` itself."""

    func: Callable[..., Any]
    in_dims: InDims
    out_dims: OutDims
    randomness: str
    chunk_size: int | None

    @property
    def name(self) -> str:
        return name_of(self.func)

    @functools.cached_property
    def label(self) -> str:
        """What errors call an active one."""
        return f"vmap({self.name})"

    def call(self, *, out: bool = False) -> str:
        """The call as the user wrote it, for messages."""
        if out:
            return f"vmap({self.name}, ..., out_dims={self.out_dims})(<inputs>)"
        return f"vmap({self.name}, in_dims={self.in_dims}, ...)(<inputs>)"


def name_of(func: Callable[..., Any]) -> str:
    """How messages call a function."""
    if isinstance(func, functools.partial):
        return f"functools.partial({name_of(func.func)}, ...)"
    return getattr(func, "__name__", None) or repr(func)


def broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """The prefix's leaf for each leaf of the tree; an int or None stands for all below it."""
    found: list[Any] = optree.broadcast_prefix(prefix, tree, is_leaf=is_dim, none_is_leaf=True)
    return found


def is_dim(value: Any) -> bool:
    return value is None or isinstance(value, int)
