"""The arguments of ``vmap``, which its parts share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from tsfunc.user_code import name_of

InDims = Any
OutDims = Any


class Spec:
    """The arguments of one ``vmap``.

    Attributes:
        splits: True if examples may take different paths.
        mesh_axes: the mesh axes whose ranks have further examples, the slowest first.
        by_name: True if ``in_dims`` names parameters.
        label: the name of an active vmap in error messages.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        in_dims: InDims,
        out_dims: OutDims = 0,
        randomness: str = "error",
        *,
        chunk_size: Any = None,  # None, a number or "auto"
        memory_budget: float | None = None,
        axis_size: Any = None,
        strict: bool = False,
        data_dependent: str = "error",
        ragged: str = "nested",
        axis_name: Hashable = None,
        mesh_axis: Any = None,  # a name or a tuple of them
    ) -> None:
        self.func = func
        self.in_dims = in_dims
        self.out_dims = out_dims
        self.randomness = randomness
        self.chunk_size = chunk_size
        self.memory_budget = memory_budget
        self.axis_size = axis_size
        self.strict = strict
        self.data_dependent = data_dependent
        self.ragged = ragged
        self.axis_name = axis_name
        self.mesh_axes = mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,)
        if mesh_axis is None:
            self.mesh_axes = ()
        self.splits = data_dependent == "split"
        self.by_name = type(in_dims) is not int and isinstance(in_dims, Mapping)
        self.label = f"vmap({name_of(func)})"

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def sized(self) -> bool:
        """True if the number of examples was given."""
        return self.axis_size is not None

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter] | None:
        """The function's parameters; None for callables without a signature, as builtins."""
        func = self.func
        try:
            target = func.forward if isinstance(func, torch.nn.Module) else func
            return inspect.signature(target).parameters
        except (TypeError, ValueError):
            return None

    def call(self, *, out: bool = False) -> str:
        """Return the call as the user wrote it, for messages."""
        if out:
            return f"vmap({self.name}, ..., out_dims={self.out_dims!r})(<inputs>)"
        return f"vmap({self.name}, in_dims={self.in_dims!r}, ...)(<inputs>)"


def is_dim(value: Any) -> bool:
    """True if a value is valid as an entry of ``in_dims`` or ``out_dims``."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool))
