"""Cost of one operator inside vmap, by each of the paths that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Case
from benchmarks.variants import variants

COUNT = 100  # operators in a call, so that the cost of the call itself is small


def sines(x: Tensor) -> Tensor:
    """The function handler serves it, which finds the rule by ``torch.sin`` itself."""
    for _ in range(COUNT):
        x = torch.sin(x)
    return x


def rolls(x: Tensor) -> Tensor:
    """The dispatch handler serves it: C++ calls the operator with its schema."""
    for _ in range(COUNT):
        x = torch.roll(x, 1, -1)
    return x


def layers(x: Tensor) -> Tensor:
    """Ten calls of models in eval mode; most are functions in Python, or return their argument."""
    for _ in range(COUNT // 10):
        x = F.dropout(F.relu(x), 0.1, training=False).float().contiguous()
        x = F.softmax(x, -1)[:].clamp(-1, 1)
        x = F.layer_norm(x, x.shape[-1:]).mT.mT
    return x


def mapped(function: Callable[..., Any], transforms: ModuleType) -> Callable[..., Any]:
    return transforms.vmap(function)


def mapped_grad(transforms: ModuleType) -> Callable[..., Any]:
    """Autograd records each operator on tracers; its backward formula is dispatched, too."""
    return transforms.vmap(transforms.grad(lambda x: sines(x).sum()))


def cases() -> Iterator[Case]:
    x, y = torch.randn(3, 4), torch.randn(3, 4, 4)
    for name, function in (("function", sines), ("dispatch", rolls)):
        yield Case(
            f"one operator in vmap, by the {name} handler",
            variants(partial(mapped, function), x, specialized=False)
            | {"plain": partial(function, x)},
            per=COUNT,
        )
    yield Case(
        "one call of a layer's in vmap",
        variants(partial(mapped, layers), y, specialized=False) | {"plain": partial(layers, y)},
        per=COUNT,
    )
    yield Case(
        "one operator in vmap of grad, with its backward",
        variants(mapped_grad, x, specialized=False),
        per=COUNT,
    )
