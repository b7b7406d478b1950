"""The laws pass for functions that satisfy them, and fail for others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc.errors import ReadOnceWarning
from tsfunc.testing import check_compose, check_grads, check_specialize, check_vmap, laws


def test_functions_that_keep_the_laws() -> None:
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    check_vmap(lambda x, y: {"a": x * y, "b": x.sum()}, x, y, in_dims=(0, None))
    check_vmap(torch.sort, x, in_dims=1)
    check_specialize(lambda x, y: (x @ y, "text", None), x, y)
    check_grads(lambda x, y: {"a": torch.tanh(x @ y), "b": x.prod()}, x, y)


def test_a_wrong_batching_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "vmap", lambda f, in_dims: lambda x: f(x) + 1)
    with pytest.raises(AssertionError, match="the stacked loop differ"):
        check_vmap(torch.sin, torch.randn(3))


def test_another_structure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "vmap", lambda f, in_dims: lambda x: (f(x),))
    with pytest.raises(AssertionError, match="differ in structure"):
        check_vmap(torch.sin, torch.randn(3))


def test_a_program_that_is_not_its_function_is_found() -> None:
    def f(x: Tensor) -> Tensor:
        return x + time.monotonic_ns() % 1000

    with pytest.warns(ReadOnceWarning), pytest.raises(AssertionError, match="traced, and f differ"):
        check_specialize(f, torch.zeros(2))
    with pytest.warns(ReadOnceWarning), pytest.raises(AssertionError, match=r"differ at \(1,\)"):
        check_specialize(lambda x: (x, time.monotonic_ns()), torch.zeros(2))


def test_a_wrong_derivative_is_found() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None:
            pass

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

        @staticmethod
        def jvp(ctx: object, *tangents: Tensor) -> Tensor:
            return tangents[0] * 3

    def wrong(x: Tensor) -> Tensor:
        return Wrong.apply(x)  # type: ignore[no-untyped-call]

    with pytest.raises(AssertionError, match="central differences differ"):
        check_grads(wrong, torch.zeros(3, dtype=torch.float64))


def test_containers_and_values_that_are_no_tensors() -> None:
    @dataclass
    class Result:
        x: Any
        name: str = "a"

    dims: Any = Result(0), Result(None)
    dims[0].name = dims[1].name = None
    one, other = Result(torch.ones(3, 2)), Result(torch.ones(2))
    check_vmap(lambda r, s: Result(r.x * s.x, "b"), one, other, in_dims=dims)
    check_specialize(lambda r: Result(r.x.sin(), r.name), Result(torch.ones(3)))
    names = iter("abcdef")
    with pytest.raises(AssertionError, match="differ at"):
        check_vmap(lambda x: (x, next(names)), torch.ones(3))


def test_transforms_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.rand(3, 2, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)

    def func(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin().sum(0) * x

    check_compose(func, x, y)
    monkeypatch.setattr(laws, "vmap", lambda f: tsfunc.vmap(lambda *args: f(*args) * 2))
    with pytest.raises(AssertionError, match=r"vmap\(f\) and the stacked loop differ"):
        check_compose(func, x, y)


LAYERS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "RMSNorm": lambda: torch.nn.RMSNorm(3),
    "LayerNorm": lambda: torch.nn.LayerNorm(3),
    "softmax": lambda: lambda x: x.softmax(-1),
    "MLP": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    ),
    "made in its own dtype": lambda: lambda x: x @ torch.ones(3, 2, dtype=x.dtype),
    "of float32 alone": lambda: _of_float32,
}


def _of_float32(x: Tensor) -> Tensor:
    if x.element_size() == 8:
        raise TypeError("expected float32")
    return x.sin() * 3


@pytest.mark.parametrize("law", [check_grads, check_compose])
@pytest.mark.parametrize("name", LAYERS)
def test_correct_functions_keep_the_laws_in_float32(name: str, law: Callable[..., None]) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        layer = LAYERS[name]()
        law(lambda x: layer(x).sum(), torch.randn(2, 3))  # noqa: B023 - called at once
        law(layer, 3 * torch.randn(2, 3))


class Scaled(torch.autograd.Function):
    """Derivatives that are wrong by a factor."""

    factor = 1.05

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: object) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.cos(x) * Scaled.factor

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangents[0] * torch.cos(x) * Scaled.factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_derivative_that_is_off_by_a_little_is_found(dtype: torch.dtype) -> None:
    def scaled(x: Tensor) -> Tensor:
        return Scaled.apply(x)  # type: ignore[no-untyped-call]

    with pytest.raises(AssertionError, match="central differences differ"):
        check_grads(scaled, torch.rand(4, dtype=dtype))


def test_a_derivative_that_is_wrong_in_float32_alone_is_found() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin() if x.element_size() == 8 else x.sin() + (x - x.detach()) / 50

    with pytest.raises(AssertionError, match=r"jvp\(f\) in float64 differ"):
        check_grads(f, torch.rand(4))


def test_tolerances_can_be_given() -> None:
    check_grads(lambda x: x.sin(), torch.rand(4), rtol=1e-3, atol=1e-3)
    with pytest.raises(AssertionError, match="differ"):
        check_grads(lambda x: x.sin(), torch.rand(4), eps=0.5, rtol=1e-6, atol=1e-6)


def test_the_traceback_ends_at_the_users_line() -> None:
    names = iter("abcdef")
    with pytest.raises(AssertionError) as caught:
        check_vmap(lambda x: (x, next(names)), torch.ones(3))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.filename for frame in frames] == [__file__]
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_assertions_of_the_function_are_its_own() -> None:
    def refuses(x: Tensor) -> Tensor:
        assert x.dim() == 1, "one dim"
        return x

    with pytest.raises(AssertionError, match="one dim") as caught:
        check_grads(refuses, torch.ones(2, 2))
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "refuses"


@pytest.mark.parametrize(
    ("func", "point"),
    [
        (torch.log, [1e-5, 1e-3]),
        (torch.sqrt, [1e-6, 1e-4]),
        (torch.relu, [0.0, 1.0, -1.0]),
        (torch.abs, [0.0, 1.0]),
        (lambda x: x.clamp(-1, 1), [-1.0, 1.0, 0.5]),
        (lambda x: torch.complex(x.relu(), x.abs()), [0.0, 2.0]),
    ],
)
def test_differences_near_poles_and_at_kinks(func: Any, point: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        check_grads(func, torch.tensor(point, dtype=dtype))

        scaled = tsfunc.custom_jvp(func)
        scaled.defjvp(lambda x, t: (func(*x), 1.01 * tsfunc.jvp(func, x, t)[1]))
        with pytest.raises(AssertionError, match="central differences"):
            check_grads(scaled, torch.tensor([*point[1:], 0.3], dtype=dtype))


def test_derivatives_at_complex_tensors_of_single_precision() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    check_grads(lambda z: z * z, z)
    check_grads(torch.abs, z)
