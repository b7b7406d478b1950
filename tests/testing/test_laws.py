"""The laws hold for what keeps them, and fail for what does not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc.errors import ReadOnceWarning
from tsfunc.testing import check_compose, check_grads, check_specialize, check_vmap, laws


def test_what_keeps_the_laws() -> None:
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
        out: Tensor = Wrong.apply(x)  # type: ignore[no-untyped-call]
        return out

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
