"""torch.compile over functions that call tsfunc: it may break its graph there, and is right."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import same

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs gcc")

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dynamo and Inductor warn of is theirs
        yield
    torch._dynamo.reset()


def scalar(x: Tensor) -> Tensor:
    return (x.sin() ** 2).sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g * 2


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "vmap": (lambda x, w: tsfunc.vmap(torch.dot, in_dims=(0, None))(x * 2, w) + 1, (X, W)),
    "grad": (lambda x: tsfunc.grad(scalar)(x + 1) * 3, (X,)),
    "vmap(grad)": (lambda x: tsfunc.vmap(tsfunc.grad(scalar))(x + 1) * 3, (X,)),
    "jvp": (lambda x: tsfunc.jvp(torch.sin, (x,), (x,))[1] * 3, (X,)),
    "hessian": (lambda x: tsfunc.hessian(scalar)(x).sum(0) + x, (W,)),
    "autograd.Function": (lambda x: Scaled.apply(x + 1).sum(), (X,)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_around_a_transform(name: str) -> None:
    """Traced by Dynamo as far as it goes, without generating code."""
    func, args = FUNCTIONS[name]
    compiled = torch.compile(func, backend="eager")
    for _ in range(2):
        same(compiled(*args), func(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_around_a_transform_with_inductor(name: str) -> None:
    func, args = FUNCTIONS[name]
    compiled = torch.compile(func)
    for _ in range(2):
        same(compiled(*args), func(*args), rtol=1e-4, atol=1e-5)


def test_a_compiled_transform() -> None:
    compiled = torch.compile(tsfunc.vmap(tsfunc.grad(scalar)), backend="eager")
    same(compiled(X), tsfunc.vmap(tsfunc.grad(scalar))(X))


def test_a_specialized_function_inside() -> None:
    program = tsfunc.specialize(lambda x: x.sin())
    compiled = torch.compile(lambda x: program(x) + 1, backend="eager")
    x = torch.randn(3, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x.sin() + 1)
    assert program.cache_info()[:3] == (1, 1, 1)
