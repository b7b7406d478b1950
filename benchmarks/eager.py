"""Eager calls of many small operators, by tsfunc and by torch.func.

Run them with the Python handlers (``TSFUNC_COMPILED=0``) and with the compiled ones
(``python -m tsfunc build``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Case
from benchmarks.variants import OURS, variants

Layers = list[tuple[Tensor, Tensor]]
WIDTH, HEADS, LENGTH, WORDS = 16, 2, 8, 32
_MASK = torch.ones(LENGTH, LENGTH).triu(1).bool()


def layers(*sizes: int) -> Layers:
    pairs = itertools.pairwise(sizes)
    return [(torch.randn(n, m) / m**0.5, torch.randn(n) / 10) for m, n in pairs]


def network(params: Layers, x: Tensor) -> Tensor:
    for weight, bias in params[:-1]:
        x = torch.tanh(weight @ x + bias)
    weight, bias = params[-1]
    return weight @ x + bias


def hessian(transforms: ModuleType) -> Callable[..., Any]:
    return transforms.hessian(lambda x, w: torch.tanh(w @ x).square().sum())


def kernel(transforms: ModuleType) -> Callable[..., Any]:
    """The neural tangent kernel of two batches: products of Jacobians by the parameters."""
    jacobians = transforms.vmap(transforms.jacrev(network), (None, 0))

    def between(params: Layers, first: Tensor, second: Tensor) -> Tensor:
        total = torch.zeros(())
        for mine, theirs in zip(jacobians(params, first), jacobians(params, second), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                total = total + torch.einsum("naf,mbf->nmab", a.flatten(2), b.flatten(2))
        return total

    return between


def adapted(transforms: ModuleType) -> Callable[..., Any]:
    """The gradient through one step of descent for each task."""

    def error(params: Layers, x: Tensor, y: Tensor) -> Tensor:
        return (network(params, x) - y).square().sum()

    def after_a_step(params: Layers, x: Tensor, y: Tensor) -> Tensor:
        steps = transforms.grad(error)(params, x, y)
        new = [
            (w - 0.01 * dw, b - 0.01 * db) for (w, b), (dw, db) in zip(params, steps, strict=True)
        ]
        return error(new, x, y)

    def total(params: Layers, x: Tensor, y: Tensor) -> Tensor:
        errors: Tensor = transforms.vmap(after_a_step, (None, 0, 0))(params, x, y)
        return errors.sum()

    return transforms.grad(total)


def through_a_pullback(params: Layers, transforms: ModuleType) -> Callable[..., Any]:
    """Per-example gradients of a function that calls a pullback made outside."""
    pull = transforms.vjp(lambda x: network(params, x), torch.ones(8))[1]
    gradients: Callable[..., Any] = transforms.vmap(
        transforms.grad(lambda x: (pull(x)[0] * x).sin().sum())
    )
    return gradients


def transformer_params() -> dict[str, Tensor]:
    sizes = {
        "words": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH),
    }  # fmt: skip
    return {name: torch.randn(size) / size[-1] ** 0.5 for name, size in sizes.items()}


def transformer(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The loss of two blocks like those of GPT-2, which share their weights."""
    x = F.embedding(tokens, params["words"]) + params["places"]
    for _ in range(2):
        normal = F.layer_norm(x, (WIDTH,))
        parts = F.linear(normal, params["qkv"]).split(WIDTH, -1)
        q, k, v = (p.view(LENGTH, HEADS, WIDTH // HEADS).transpose(0, 1) for p in parts)
        scores = (q @ k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(_MASK, float("-inf")).softmax(-1)
        x = x + F.linear((weights @ v).transpose(0, 1).reshape(LENGTH, WIDTH), params["out"])
        hidden = F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), params["up"]))
        x = x + F.linear(hidden, params["down"])
    return F.cross_entropy(F.linear(x[:-1], params["words"]), tokens[1:])


def per_text(transforms: ModuleType) -> Callable[..., Any]:
    return transforms.vmap(transforms.grad(transformer), (None, 0))


def cases() -> Iterator[Case]:
    small = layers(8, 8, 8, 4)
    for name, make, args in (
        ("hessian of a function of 8 numbers", hessian, (torch.randn(8), torch.randn(8, 8))),
        ("NTK of a small MLP", kernel, (small, torch.randn(6, 8), torch.randn(6, 8))),
        ("gradient through a step for 5 tasks", adapted,
         (layers(8, 8, 8, 8), torch.randn(5, 8), torch.randn(5, 8))),
        ("gradients through a captured pullback", partial(through_a_pullback, layers(8, 8, 8)),
         (torch.randn(5, 8),)),
        ("per-example gradients of two transformer blocks", per_text,
         (transformer_params(), torch.randint(WORDS, (4, LENGTH)))),
    ):  # fmt: skip
        yield Case(f"eager: {name}", variants(make, *args, specialized=False), goals={OURS: 1.0})
