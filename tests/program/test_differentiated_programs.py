"""Derivatives of programs that contain derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tsfunc import MetaTensorType, grad, hessian, jacfwd, jacrev, jvp, specialize, vjp


def matrix(x: Tensor) -> Tensor:
    return 2 * torch.eye(3, dtype=x.dtype) + torch.outer(x, x.cos()) + torch.outer(x.sin(), x)


# The backward formulas of the first three functions solve with factors that the operator saved.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "det": lambda x: torch.linalg.det(matrix(x)),
    "slogdet": lambda x: torch.linalg.slogdet(matrix(x))[1],
    "solve": lambda x: torch.linalg.solve(matrix(x), x).sum(),
    "inv": lambda x: torch.linalg.inv(matrix(x)).sum(),
    "cholesky": lambda x: torch.linalg.cholesky(matrix(x) @ matrix(x).mT).sin().sum(),
    "svdvals": lambda x: torch.linalg.svdvals(matrix(x)).sin().sum(),
    "lu_factor": lambda x: torch.linalg.lu_factor(matrix(x))[0].sin().sum(),
    "softmax": lambda x: (x.softmax(0) * x).sum(),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (3,)).sin().sum(),
}
PROGRAMS: dict[str, Any] = {
    "grad": lambda f: specialize(grad(f)),
    "vjp": lambda f: specialize(lambda x: vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0]),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_second_derivatives(name: str, program: str) -> None:
    f = FUNCTIONS[name]
    x = torch.randn(3, dtype=torch.float64)
    expected = torch.autograd.functional.hessian(f, x)
    for transform in (jacrev, jacfwd):
        found = transform(PROGRAMS[program](f))(x)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
# The tangents of their pullbacks have formulas of torch's own.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": functional.cross_entropy,
    "cross entropy of smoothed labels": lambda x, y: functional.cross_entropy(
        x, y, WEIGHTS, label_smoothing=0.1
    ),
    "likelihood": lambda x, y: functional.nll_loss(x.sin(), y, WEIGHTS, ignore_index=1),
    "likelihood of images": lambda x, y: functional.nll_loss(
        x.sin()[..., None, None], y[:, None, None], reduction="sum"
    ),
    "each likelihood": lambda x, y: functional.nll_loss(x.sin(), y, reduction="none").sum(),
    "logarithms of sigmoids": lambda x, y: functional.logsigmoid(x).mul(x.cos()).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_of_losses_are_one_program_for_all_sizes(name: str) -> None:
    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[name](x @ w, y)

    program = specialize(hessian(loss), {"x": MetaTensorType(["n", 2]), "y": MetaTensorType(["n"])})
    w = torch.randn(2, 3, dtype=torch.float64)
    for n in (4, 7):
        x, y = torch.randn(n, 2, dtype=torch.float64), torch.randint(0, 3, (n,))
        expected = torch.autograd.functional.hessian(functools.partial(loss, x=x, y=y), w)
        torch.testing.assert_close(program(w, x, y), expected, rtol=1e-8, atol=1e-10)
    assert program.cache_info().programs == 1


def test_one_tangent_of_a_gradient_is_one_program_for_all_sizes() -> None:
    def product(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        gradient = grad(lambda w: functional.cross_entropy(x @ w, y))
        return jvp(gradient, (w,), (w.cos(),))[1]

    program = specialize(product, {"x": MetaTensorType(["n", 2]), "y": MetaTensorType(["n"])})
    w = torch.randn(2, 3, dtype=torch.float64)
    for n in (4, 7):
        x, y = torch.randn(n, 2, dtype=torch.float64), torch.randint(0, 3, (n,))
        torch.testing.assert_close(program(w, x, y), product(w, x, y))
    assert program.cache_info().programs == 1
