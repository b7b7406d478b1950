"""Derivatives, in a trace, of a pullback whose graph was recorded outside of the trace.

The formulas of such a pass compute with the values that the graph has saved, whose derivatives
belong to transforms around the trace. The results are those of calls without a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc

Function = Callable[[Tensor], Tensor]

F64 = torch.float64
W = torch.randn(3, 3, dtype=F64)


def matrix(y: Tensor) -> Tensor:
    return torch.outer(y, y) + torch.diag(y.exp())


# Each has a second derivative that computes with what it has saved.
FUNCTIONS: dict[str, Function] = {
    "tanh": lambda y: (W @ y).tanh(),
    "matmul": lambda y: matrix(y) @ matrix(y) @ y,
    "norm": lambda y: y * (W @ y).norm(p=3),
    "cumprod": lambda y: (W @ y).cumprod(0),
    "softmax": lambda y: (W @ y).softmax(0),
    "softplus": lambda y: torch.nn.functional.softplus(W @ y),
    "maximum": lambda y: torch.maximum(W @ y, y.sin()) ** 2,
    "std": lambda y: y * (W @ y).std(),
    "inv": lambda y: torch.linalg.inv(matrix(y)) @ y,
    "solve": lambda y: torch.linalg.solve(matrix(y), y),
    "slogdet": lambda y: torch.linalg.slogdet(matrix(y))[1] * y,
    "cholesky": lambda y: torch.linalg.cholesky(matrix(y)).sin() @ y,
    "eig": lambda y: torch.linalg.eig(matrix(y))[1].abs() @ y,
    "conjugate": lambda y: torch.view_as_real((y * W.to(torch.complex128)).mH - y * 2j)[0].sum(1),
    "matrix_exp": lambda y: torch.linalg.matrix_exp(torch.outer(y, y)) @ y,
}

USES: dict[str, Callable[[Function], Function]] = {
    "pullback": lambda pulled: pulled,
    "grad": lambda pulled: tsfunc.grad(lambda v: pulled(v).square().sum()),
    "vjp": lambda pulled: lambda v: tsfunc.vjp(lambda u: pulled(u).cos(), v)[1](v)[0],
    "jvp": lambda pulled: lambda v: tsfunc.jvp(lambda u: pulled(u).cos(), (v,), (v.sin(),))[1],
    "jacrev": lambda pulled: lambda v: tsfunc.jacrev(lambda u: pulled(u).sin())(v).sum(0),
}


def in_cond(use: Function) -> Function:
    return lambda x: tsfunc.cond(x.sum() < x.abs().sum() + 1, use, torch.cos, x)


def in_other_branch(use: Function) -> Function:
    return lambda x: tsfunc.cond(x.sum() > x.abs().sum() + 1, use, torch.cos, x)


TRACES: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "specialize": (tsfunc.specialize, lambda use: use),
    "specialize(vmap)": (
        lambda use: lambda x: tsfunc.specialize(tsfunc.vmap(use))(x * W).sum(0),
        lambda use: lambda x: torch.stack([use(row) for row in x * W]).sum(0),
    ),
    "cond": (in_cond, lambda use: use),
    "other branch": (in_other_branch, lambda use: torch.cos),
}

OUTERS: dict[str, Callable[[Function], Callable[[Tensor], Any]]] = {
    "jvp": lambda f: lambda x: tsfunc.jvp(f, (x,), (x.cos(),)),
    "grad": lambda f: tsfunc.grad(lambda x: f(x).sum()),
    "jacrev(grad)": lambda f: tsfunc.jacrev(tsfunc.grad(lambda x: f(x).sum())),
    "hessian": lambda f: tsfunc.hessian(lambda x: f(x).sum()),
    "specialize(jvp)": lambda f: tsfunc.specialize(lambda x: tsfunc.jvp(f, (x,), (x.cos(),))),
}


def drawn(choices: dict[str, Any]) -> str:
    return list(choices)[int(torch.randint(len(choices), ()))]


def with_pullback(function: Function, use: str, trace: Callable[[Function], Function]) -> Function:
    """Return a function that makes a pullback, and uses it in a trace."""

    def call(x: Tensor) -> Tensor:
        _, pull = tsfunc.vjp(function, x)
        return trace(USES[use](lambda v: pull(v)[0]))(x)

    return call


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_captured_pullback_has_its_derivatives_in_a_trace(name: str, outer: str) -> None:
    trace, use = drawn(TRACES), drawn(USES)
    traced, plain = TRACES[trace]
    x = torch.randn(3, dtype=F64) / 2
    results, expected = (
        OUTERS[outer](with_pullback(FUNCTIONS[name], use, how))(x) for how in (traced, plain)
    )
    torch.testing.assert_close(results, expected, msg=lambda text: f"{trace}, {use}: {text}")
