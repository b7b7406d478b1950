"""Fourier transforms under vmap are those of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, hvp, vmap

TRANSFORMS: list[Callable[..., Any]] = [
    torch.fft.fft,
    torch.fft.ifft,
    torch.fft.rfft,
    torch.fft.ihfft,
    torch.fft.irfft,
    torch.fft.hfft,
    torch.fft.fft2,
    torch.fft.rfft2,
    torch.fft.irfft2,
    torch.fft.fftn,
]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_each_example_is_transformed(transform: Callable[..., Any], at: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    want = torch.stack([transform(x.select(at, i)) for i in range(x.shape[at])])
    torch.testing.assert_close(vmap(transform, in_dims=at)(x), want)


def test_per_example_gradients() -> None:
    def power(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.fft.rfft(x).abs().square().sum()
        return total

    x = torch.randn(3, 6, dtype=torch.float64)
    want = torch.stack([torch.func.grad(power)(row) for row in x])
    torch.testing.assert_close(vmap(grad(power))(x), want)


def test_second_derivatives() -> None:
    """The formulas conjugate lazily what is the same for each example."""
    x, v = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        out: Tensor = torch.fft.ifft(x).real.pow(3).sum()
        return out

    def along(x: Tensor) -> Tensor:
        out: Tensor = hvp(f, (x,), (v,))
        return out

    want = torch.stack([torch.autograd.functional.hvp(f, one, v)[1] for one in x])
    torch.testing.assert_close(vmap(along)(x), want)


def test_derivatives_of_istft_with_windows() -> None:
    signal, windows = torch.randn(40), torch.rand(3, 16) + 0.5
    spectrum = torch.stft(signal, 16, window=torch.ones(16), return_complex=True)

    def total(window: Tensor) -> Tensor:
        return torch.istft(spectrum, 16, window=window).square().sum()

    want = torch.stack([grad(total)(window) for window in windows])
    torch.testing.assert_close(vmap(grad(total))(windows), want)
    torch.testing.assert_close(grad(lambda w: vmap(total)(w).sum())(windows), want)
