"""Costs of vmap: a call that does nothing, small operators, a Laplacian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Case
from benchmarks.variants import INDUCTOR, OURS, SPECIALIZED, variants


def identity(x: Tensor) -> Tensor:
    return x


def fifty_small(x: Tensor) -> Tensor:
    """Fifty elementwise operators on a few numbers."""
    for _ in range(10):
        x = torch.sin(x) * 0.5 + x
        x = torch.tanh(x) - 0.25
    return x


def vmap_of(function: Callable[..., Any], transforms: ModuleType) -> Callable[..., Any]:
    return transforms.vmap(function)


def laplacian(transforms: ModuleType) -> Callable[..., Any]:
    """The trace of a Hessian at each of many points, as physics-informed networks need it."""

    def at_point(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        def field(x: Tensor) -> Tensor:
            return torch.tanh(weight @ x + bias).sum()

        return transforms.hessian(field)(x).trace()

    return transforms.vmap(at_point, in_dims=(None, None, 0))


def cases() -> Iterator[Case]:
    yield Case(
        "vmap call of the identity",
        variants(partial(vmap_of, identity), torch.randn(3, 4), specialized=False),
        goals={OURS: 0.25},
    )
    x = torch.randn(16, 12)
    yield Case(
        "vmap of 50 small elementwise operators",
        variants(partial(vmap_of, fifty_small), x) | {"by hand": partial(fifty_small, x)},
        goals={OURS: 1.0, SPECIALIZED: 0.52, INDUCTOR: 0.08},
    )
    yield Case(
        "vmap of a Laplacian, 64 points of 8 dims",
        variants(laplacian, torch.randn(32, 8), torch.randn(32), torch.randn(64, 8)),
        goals={OURS: 1.0, SPECIALIZED: 0.2, INDUCTOR: 0.04},
    )
