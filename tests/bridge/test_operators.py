"""Operators of users under the transforms, with the kernels that they register."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsfunc
from tsfunc import dispatch
from tsfunc.dispatch import DispatchKey, Operator
from tsfunc.errors import DispatchError

_count = itertools.count()


def _function(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return (x * scale).sin() * x


def made(where: str, function: Callable[..., Any] = _function) -> Operator:
    op = Operator(f"user::op_{next(_count)}", native=function if where == "native" else None)
    if where == "cell":
        dispatch.register(op, DispatchKey.CPU, function)
    if where == "cell beside native":
        op.native = lambda *args, **kwargs: pytest.fail("the backend's cell comes first")
        dispatch.register(op, DispatchKey.CPU, function)
    if where == "row":
        dispatch.register_catch_all(op, function)
    if where == "calls another":
        inner = made("cell", function)
        op.native = lambda *args, **kwargs: inner(*args, **kwargs)
    return op


KERNELS = ["native", "cell", "cell beside native", "row", "calls another"]
Function = Callable[..., Any]
TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap": tsfunc.vmap,
    "vmap 1": lambda f: tsfunc.vmap(f, 1, 1),
    "vmap vmap": lambda f: tsfunc.vmap(tsfunc.vmap(f, 0, 1), 2, 0),
    "grad": lambda f: tsfunc.grad(lambda x: f(x).sum()),
    "vmap grad": lambda f: tsfunc.vmap(tsfunc.grad(lambda x: f(x).sum()), 1),
    "grad vmap": lambda f: tsfunc.grad(lambda x: tsfunc.vmap(f, 1)(x).square().sum()),
    "jvp": lambda f: lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1],
    "vmap jvp": lambda f: tsfunc.vmap(lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1], 2),
    "vmap hessian": lambda f: tsfunc.vmap(tsfunc.hessian(lambda x: f(x).sum()), 1),
    "vmap grad vmap grad": lambda f: tsfunc.vmap(
        tsfunc.grad(lambda x: tsfunc.vmap(tsfunc.grad(lambda y: f(y).sum()))(x).sum()), 1
    ),
    "chunks": lambda f: tsfunc.vmap(f, chunk_size=2),
}


@pytest.mark.parametrize("where", KERNELS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")
def test_an_operator_is_the_function_that_its_backend_runs(where: str, transform: str) -> None:
    op, apply = made(where), TRANSFORMS[transform]
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(apply(op)(x), apply(_function)(x))


@pytest.mark.parametrize("where", KERNELS)
@pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")
def test_with_arguments_by_name(where: str) -> None:
    op = made(where)
    x = torch.randn(3, 2)
    for transform in (TRANSFORMS["vmap"], TRANSFORMS["vmap grad"]):
        expected = transform(lambda x: _function(x, scale=3.0))(x)
        torch.testing.assert_close(transform(lambda x: op(x, scale=3.0))(x), expected)


def test_without_a_kernel_for_the_backend_the_error_says_so() -> None:
    op = Operator(f"user::op_{next(_count)}")
    dispatch.register(op, DispatchKey.CUDA, lambda x: x)
    message = rf"{op.name}\(\w*\): no backend kernel. It has kernels for: DispatchKey.CUDA"
    for call in (op, tsfunc.vmap(tsfunc.grad(op))):
        with pytest.raises(DispatchError, match=message):
            call(torch.ones(3))


def test_a_batching_kernel_serves_vmap_and_the_function_its_derivatives() -> None:
    served = []
    op = made("native")

    @dispatch.register(op, DispatchKey.Batch)
    def batched(x: torch.Tensor) -> torch.Tensor:
        served.append(1)
        return _function(x)

    x = torch.randn(3, 2)
    torch.testing.assert_close(tsfunc.vmap(op)(x), _function(x))
    assert served
    found = tsfunc.vmap(tsfunc.grad(lambda x: op(x).sum()))(x)
    torch.testing.assert_close(found, tsfunc.grad(lambda x: _function(x).sum())(x))


# A catch-all kernel serves the trace's key itself, and its calls on tracers are refused.
@pytest.mark.parametrize("where", [where for where in KERNELS if where != "row"])
def test_a_program_is_the_function_that_the_backend_runs(where: str) -> None:
    program = tsfunc.specialize(made(where), {})
    for x in (torch.randn(3), torch.randn(3)):
        torch.testing.assert_close(program(x), _function(x))
    assert program.cache_info().programs == 1
