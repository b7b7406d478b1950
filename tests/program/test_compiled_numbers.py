"""Numbers that vary are inputs of compiled programs: NOTE [numbers of compiled programs].

The reference is the program without a backend. Torch's own operators get the same numbers, so that
results of ``aot_eager`` are equal to the last bit; Inductor may order roundings differently.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tsfunc import MetaTensorType, Specialized, grad, scan, specialize, vmap
from tsfunc.errors import RetraceWarning

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
pytestmark = pytest.mark.filterwarnings(  # inductor's import
    "ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_gcc, pytest.mark.slow])]
F64 = torch.float64
N3 = MetaTensorType(["n", 3])


def arithmetic(x: Tensor, r: float, k: int) -> Any:
    return x * r * 0.9**k + x.sin() * (k + 1) + (r - x) / r + x % r + x.abs() ** r + x**k


def choices(x: Tensor, r: float, k: int) -> Any:
    return (
        torch.where(x > r, x, r),
        x.clamp(-r, r),
        x.masked_fill(x < 0, r),
        x.ge(k),
        x.lerp(x * 2, r),
    )


def scaled(x: Tensor, r: float, k: int) -> Any:
    y = x.clone().mul_(r).add_(x, alpha=r).addcmul_(x, x, value=r)
    return y.sub(x, alpha=k), x.addcdiv(x, x.exp(), value=-r)


def made(x: Tensor, r: float, k: int) -> Any:
    return torch.full((3,), r, dtype=x.dtype), torch.full_like(x, r), torch.tensor(r) * x, x * 2 + r


def numbers(x: Tensor, r: float, k: int) -> Any:
    return x * r, r * 2, k + 1, {"both": r * k}


def sizes(x: Tensor, r: float, k: int) -> Any:
    return x.narrow(0, k - 2, 2), torch.zeros(k), x.repeat(k), x.expand(k, 8).sum(0) * r


def derivatives(x: Tensor, r: float, k: int) -> Any:
    return grad(lambda x: (x.sin() * r).sum() + (x**2).sum() * k)(x), vmap(
        grad(lambda e: (e * e * r).sum())
    )(x)


def loop(x: Tensor, r: float, k: int) -> Any:
    last, every = scan(lambda c, e: (c * 0.5 + e, c), x[0], x * r)
    return last * k, every


FUNCTIONS = [arithmetic, choices, scaled, made, numbers, sizes, derivatives]


def assert_same(got: Any, expected: Any, backend: str) -> None:
    exact = backend == "aot_eager"
    torch.testing.assert_close(
        got, expected, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-13
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("func", FUNCTIONS)
def test_one_program_serves_all_numbers(func: Callable[..., Any], backend: str) -> None:
    compiled, plain = specialize(func, backend=backend), specialize(func)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetraceWarning)
        for i in range(6):
            x = torch.randn(8, dtype=F64)
            args = x, 0.1 + 1 / (3 * i + 7), i + 2
            assert_same(compiled(*args), plain(*args), backend)
    assert compiled.cache_info().programs == plain.cache_info().programs == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("func", [arithmetic, derivatives, loop])
def test_described_numbers_beside_open_sizes(func: Callable[..., Any], backend: str) -> None:
    descriptors = {"x": N3, "r": float, "k": int}
    compiled = specialize(func, descriptors, backend=backend)
    for i in range(5):
        args = torch.randn(2 + i, 3, dtype=F64), 0.3 / (i + 1), i + 2
        torch.testing.assert_close(compiled(*args), func(*args), rtol=1e-12, atol=1e-13)
    assert compiled.cache_info().programs == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_keep_all_bits(backend: str) -> None:
    """Inductor reads numbers of tensors as floats of 32 bits."""
    compiled = specialize(lambda x, r: x * (r - 1), {"r": float}, backend=backend)
    x = torch.ones((), dtype=F64)
    for r in (1 + 2.0**-40, 1e-300, 1 / 3):
        assert compiled(x, r).item() == r - 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_every_order(backend: str) -> None:
    def func(x: Tensor, r: float) -> Any:
        return r * 3, (x * r).sin() * r

    compiled = specialize(func, {"r": float}, backend=backend)
    x = torch.randn(4, dtype=F64, requires_grad=True)
    for r in (0.3, 0.7, 2.5):
        orders = []
        for each in (compiled, func):
            number, y = each(x, r)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            orders.append((number, y, first, second))
        torch.testing.assert_close(*orders, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_learning_rate_that_a_scheduler_changes(optimizer: str, backend: str) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    data = torch.randn(6, 5, 3, dtype=F64)
    results, programs = [], []
    for through in ("eager mode", "python", backend):
        own = copy.deepcopy(model)
        opt = getattr(torch.optim, optimizer)(own.parameters(), lr=0.1, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

        def step(x: Tensor, own: Any = own, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss: Tensor = own(x).square().sum()
            loss.backward()
            opt.step()
            return loss

        run = step if through == "eager mode" else specialize(step, backend=through)
        for x in data:
            run(x)
            scheduler.step()
        results.append([p.detach() for p in own.parameters()])
        programs.append(run.cache_info().programs if isinstance(run, Specialized) else 0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-12, atol=1e-14)
    if backend == "aot_eager":
        torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)
    assert programs == [0, 2, 2]


@needs_gcc
@pytest.mark.slow
def test_a_number_that_inductor_cannot_take() -> None:
    compiled = specialize(lambda x, slope, r: F.leaky_relu(x, slope) * r, backend="inductor")
    with pytest.warns(RetraceWarning, match="needs slope as a constant"):
        for i in range(4):
            x = torch.randn(4, dtype=F64)
            got = compiled(x, 0.1 * (i + 1), 0.3 * (i + 1))
            torch.testing.assert_close(got, F.leaky_relu(x, 0.1 * (i + 1)) * (0.3 * (i + 1)))
    misses = compiled.cache_info().misses
    compiled(x, 0.4, 7.0), compiled(x, 0.4, 8.0), compiled(x, 0.4, 9.0)
    assert compiled.cache_info().misses <= misses + 2  # r is an input, too


def test_constants_of_the_function_do_not_keep_numbers_from_being_inputs() -> None:
    s = specialize(lambda x, r: x * torch.tensor([1.0, 2.0]) * torch.tensor(r) + torch.tensor(3))
    for i in range(6):
        x, r = torch.randn(2), 0.1 * (i + 1)
        torch.testing.assert_close(s(x, r), x * torch.tensor([1.0, 2.0]) * torch.tensor(r) + 3)
    assert s.cache_info().programs == 3
