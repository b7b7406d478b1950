"""Derivatives of programs that contain derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, jacfwd, jacrev, specialize, vjp


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
