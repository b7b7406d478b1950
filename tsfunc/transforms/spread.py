"""Vmaps whose examples are spread over the ranks of mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.mesh.spread_level import SpreadLevel
from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.transforms.out_dims import result_of
from tsfunc.transforms.vmap_spec import Spec


def spread_once(func: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    """Return a function that runs one example of a batch that is spread over all ranks.

    The function draws the random numbers of its own index: NOTE [random numbers of an example] in
    ``ops/philox``.
    """
    spec = Spec(func, None, 0, "split", None, None, 1, False, "error", "error", None)

    def run(*args: Any) -> Any:
        level = SpreadLevel(1, "split", spec.label, False, axes)
        with level, watching_random():
            out = func(*args)
        return pytrees.tree_map(lambda x: _only(result_of(spec, x, 0, level)), out)

    return run


def _only(value: Any) -> Any:
    return value.select(0, 0) if isinstance(value, torch.Tensor) else value
