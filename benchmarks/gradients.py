"""Costs of derivatives: per-example gradients, a stack of models, a tiny function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Call, Case
from benchmarks.variants import INDUCTOR, OURS, SPECIALIZED, variants

Params = list[tuple[Tensor, Tensor]]

SIZES = (128, 128, 128, 10)


def mlp_params(*lead: int) -> Params:
    """Weights and biases of an MLP, or of a stack of them."""
    pairs = itertools.pairwise(SIZES)
    return [(torch.randn(*lead, n, m) / m**0.5, torch.randn(*lead, n) / 10) for m, n in pairs]


def loss(params: Params, x: Tensor, label: Tensor) -> Tensor:
    for weight, bias in params[:-1]:
        x = torch.tanh(F.linear(x, weight, bias))
    return F.cross_entropy(F.linear(x, *params[-1]), label)


def per_example(transforms: ModuleType) -> Callable[..., Any]:
    return transforms.vmap(transforms.grad(loss), in_dims=(None, 0, 0))


def per_model(transforms: ModuleType) -> Callable[..., Any]:
    return transforms.vmap(transforms.grad(loss), in_dims=(0, None, None))


def tiny(x: Tensor) -> Tensor:
    return (torch.sin(x) * x).sum()


def tiny_grad(transforms: ModuleType) -> Callable[..., Any]:
    return transforms.grad(tiny)


def by_autograd(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(tiny(x), x)[0]


def cases() -> Iterator[Case]:
    params = mlp_params()
    for batch, goal, compiled in ((64, 0.25, 0.08), (1024, 0.86, 0.56)):
        x, labels = torch.randn(batch, SIZES[0]), torch.randint(SIZES[-1], (batch,))
        yield Case(
            f"per-example gradients of an MLP, batch {batch}",
            variants(per_example, params, x, labels),
            goals={OURS: 1.0, SPECIALIZED: goal, INDUCTOR: compiled},
        )
    x, labels = torch.randn(64, SIZES[0]), torch.randint(SIZES[-1], (64,))
    yield Case(
        "gradients of 16 stacked MLPs, batch 64",
        variants(per_model, mlp_params(16), x, labels),
        goals={OURS: 1.0, SPECIALIZED: 0.6, INDUCTOR: 0.42},
    )
    x = torch.randn(12)
    autograd: dict[str, Call] = {"torch.autograd.grad": partial(by_autograd, x)}
    yield Case("grad call of a tiny function", variants(tiny_grad, x) | autograd)
