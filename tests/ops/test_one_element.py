"""Derivatives of statistics over one element, or over equal elements: the variance is zero.

The reference is a formula of plain operators, differentiated by torch.autograd for each example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tsfunc import grad, hessian, jacfwd, jacrev, jvp, specialize, vmap

SIZE = 3  # of the batch
Function = Callable[[Tensor], Tensor]


def standardized(x: Tensor, dims: list[int], eps: float = 1e-5) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered / ((centered * centered).mean(dims, keepdim=True) + eps).sqrt()


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


def scaled(x: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()


def repeated(x: Tensor) -> Tensor:
    """Return two equal samples of two channels."""
    return x[0].expand(2, 2)


# The functions of torch, and their formulas. Each takes an example of shape (2, k).
FUNCTIONS: dict[str, tuple[int, Function, Function]] = {
    "layer_norm": (1, lambda x: F.layer_norm(x, (1,)), lambda x: standardized(x, [-1])),
    "layer_norm with a small eps": (
        1, lambda x: F.layer_norm(x, (1,), eps=1e-9), lambda x: standardized(x, [-1], 1e-9),
    ),
    "layer_norm with weights of the input": (
        1,
        lambda x: F.layer_norm(x, (1,), x[0], x[1]),
        lambda x: affine(standardized(x, [-1]), x[0], x[1]),
    ),
    "layer_norm of equal elements": (
        1, lambda x: F.layer_norm(x[0].expand(3), (3,)),
        lambda x: standardized(x[0].expand(3), [-1]),
    ),
    "group_norm": (2, lambda x: F.group_norm(x, 2), lambda x: standardized(x[..., None], [-1])),
    "group_norm with weights of the input": (
        2, lambda x: F.group_norm(x, 2, x[0], x[1]),
        lambda x: affine(standardized(x[..., None], [-1])[..., 0], x[0], x[1]),
    ),
    "batch_norm of equal samples": (
        2, lambda x: F.batch_norm(repeated(x), None, None, x[0], x[1], training=True),
        lambda x: affine(standardized(repeated(x), [0]), x[0], x[1]),
    ),
    "instance_norm of equal elements": (
        2, lambda x: F.instance_norm(x[..., None].expand(2, 2, 2)),
        lambda x: standardized(x[..., None].expand(2, 2, 2), [-1]),
    ),
    "rms_norm": (
        1, lambda x: F.rms_norm(x, (1,), x[0], 0.1), lambda x: scaled(x, 0.1) * x[0],
    ),
    "normalize": (
        1, lambda x: F.normalize(x, dim=-1), lambda x: x / (x * x).sum(-1, keepdim=True).sqrt(),
    ),
    "var": (1, lambda x: torch.var(x, -1, correction=0), lambda x: 0 * x),
    "var_mean": (1, lambda x: torch.var_mean(x, -1, correction=0)[1], lambda x: x[..., 0]),
    "cosine_similarity": (
        1, lambda x: F.cosine_similarity(x, x + 4, -1),
        lambda x: (x * (x + 4) / ((x * x).sqrt() * ((x + 4) * (x + 4)).sqrt()))[..., 0],
    ),
    "vector_norm": (
        1, lambda x: torch.linalg.vector_norm(x, 3, -1), lambda x: (x * x).sum(-1).sqrt(),
    ),
    "cdist": (
        1, lambda x: torch.cdist(x[:1], x[1:] + 9),
        lambda x: ((x[:1] - x[1:] - 9) * (x[:1] - x[1:] - 9)).sqrt(),
    ),
    "weight_norm": (
        1, lambda x: torch._weight_norm(x, x[:, :1] + 4, 0),
        lambda x: x / (x * x).sqrt() * (x[:, :1] + 4),
    ),
    "softmax": (1, lambda x: torch.softmax(x, -1), lambda x: x * 0 + 1),
    "logsumexp": (1, lambda x: torch.logsumexp(x, -1), lambda x: x[..., 0]),
}  # fmt: skip


def number(func: Function) -> Function:
    """Return a function with a number as the result, whose derivatives of all orders differ."""

    def loss(x: Tensor) -> Tensor:
        out = func(x).reshape(-1)
        shifts = torch.arange(1, out.numel() + 1, dtype=out.dtype)
        return (out + 0.3 * shifts).sin().sum()

    return loss


def derivative(func: Function, x: Tensor, order: int) -> Tensor:
    """Return a derivative of a formula by nested passes of torch.autograd."""
    if order == 0:
        return func(x)
    x = x.detach().requires_grad_() if not x.requires_grad else x
    below = derivative(func, x, order - 1)
    rows = [
        torch.autograd.grad(each, x, create_graph=True, materialize_grads=True)[0]
        if each.requires_grad
        else torch.zeros_like(x)
        for each in below.reshape(-1)
    ]
    return torch.stack(rows).reshape(*below.shape, *x.shape)


def pushed(func: Function) -> Function:
    return lambda x: jvp(func, (x,), (x.cos(),))[1]


def of_batch(func: Function, bdim: int) -> Function:
    """Return the gradient of the sum of a batch: the transforms in the other order."""
    return lambda x: grad(lambda x: vmap(func, bdim)(x).sum())(x).movedim(bdim, 0)


TOWERS: dict[str, tuple[int, Callable[[Function, int], Function]]] = {
    "vmap(f)": (0, vmap),
    "vmap(grad)": (1, lambda f, at: vmap(grad(f), at)),
    "grad(vmap)": (1, of_batch),
    "vmap(jacfwd)": (1, lambda f, at: vmap(jacfwd(f), at)),
    "vmap(jvp)": (-1, lambda f, at: vmap(pushed(f), at)),
    "jvp(vmap)": (-1, lambda f, at: pushed(vmap(f, at))),
    "vmap(hessian)": (2, lambda f, at: vmap(hessian(f), at)),
    "vmap(jacrev(jacrev))": (2, lambda f, at: vmap(jacrev(jacrev(f)), at)),
    "vmap(jacfwd(jacfwd))": (2, lambda f, at: vmap(jacfwd(jacfwd(f)), at)),
    "vmap(jacrev(jacfwd))": (2, lambda f, at: vmap(jacrev(jacfwd(f)), at)),
    "vmap(jacfwd(hessian))": (3, lambda f, at: vmap(jacfwd(hessian(f)), at)),
    "vmap(jacrev(jacrev(jacrev)))": (3, lambda f, at: vmap(jacrev(jacrev(jacrev(f))), at)),
}


def check(name: str, tower: str, at: int, program: bool, dtype: torch.dtype, seed: int) -> None:
    width, func, formula = FUNCTIONS[name]
    order, build = TOWERS[tower]
    generator = torch.Generator().manual_seed(seed)
    # Norms of elements near zero have no accurate derivatives.
    x = torch.rand(SIZE, 2, width, dtype=torch.float64, generator=generator) + 0.5
    wanted = torch.stack([derivative(number(formula), one, abs(order)) for one in x]).detach()
    if order == -1:
        wanted = (wanted * x.cos()).flatten(1).sum(1)
    transformed: Any = build(number(func), at)
    if program:
        transformed = specialize(transformed)
    got = transformed(x.to(dtype).movedim(0, at))
    tolerance = 1e-7 if dtype is torch.float64 else 2e-2
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=4)
@given(
    tower=st.sampled_from(sorted(TOWERS)),
    at=st.integers(0, 2),
    program=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_derivatives(name: str, tower: str, at: int, program: bool, seed: int) -> None:
    check(name, tower, at, program, torch.float64, seed)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=2)
@given(
    tower=st.sampled_from([name for name, (order, _) in TOWERS.items() if order < 2]),
    at=st.integers(0, 2),
    program=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_first_derivatives_in_single_precision(
    name: str, tower: str, at: int, program: bool, seed: int
) -> None:
    check(name, tower, at, program, torch.float32, seed)


@pytest.mark.slow
@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_tower(name: str, tower: str, program: bool) -> None:
    for at in range(3):
        check(name, tower, at, program, torch.float64, seed=at)
