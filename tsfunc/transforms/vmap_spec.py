"""What the parts of ``vmap`` share: its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

InDims = Any
OutDims = Any


@dataclass(frozen=True)
class Spec:
    """The arguments of ``vmap`` itself."""

    func: Callable[..., Any]
    in_dims: InDims
    out_dims: OutDims
    randomness: str
    chunk_size: Any  # None, a number or "auto"
    memory_budget: float | None
    axis_size: Any
    strict: bool
    data_dependent: str
    ragged: str
    axis_name: Hashable

    @functools.cached_property
    def splits(self) -> bool:
        """Whether examples may go different ways."""
        return self.data_dependent == "split"

    @property
    def name(self) -> str:
        return name_of(self.func)

    @functools.cached_property
    def label(self) -> str:
        """What errors call an active one."""
        return f"vmap({self.name})"

    @functools.cached_property
    def by_name(self) -> bool:
        """Whether ``in_dims`` names parameters."""
        return isinstance(self.in_dims, Mapping)

    @property
    def sized(self) -> bool:
        """Whether the number of examples was given."""
        return self.axis_size is not None

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter] | None:
        """The function's parameters; None where it does not tell, as builtins."""
        func = self.func
        try:
            target = func.forward if isinstance(func, torch.nn.Module) else func
            return inspect.signature(target).parameters
        except (TypeError, ValueError):
            return None

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


def is_dim(value: Any) -> bool:
    """Whether a value can stand in ``in_dims`` or ``out_dims`` by itself."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
