"""Fourier transforms under vmap are those of each example."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, hvp, specialize, vmap

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


@pytest.mark.parametrize("bdim", [0, 1, 2])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_each_example_is_transformed(transform: Callable[..., Any], bdim: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    want = torch.stack([transform(x.select(bdim, i)) for i in range(x.shape[bdim])])
    torch.testing.assert_close(vmap(transform, in_dims=bdim)(x), want)


def test_per_example_gradients() -> None:
    def power(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs().square().sum()

    x = torch.randn(3, 6, dtype=torch.float64)
    want = torch.stack([torch.func.grad(power)(row) for row in x])
    torch.testing.assert_close(vmap(grad(power))(x), want)


def test_second_derivatives() -> None:
    """The formulas lazily conjugate values that all examples share."""
    x, v = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return torch.fft.ifft(x).real.pow(3).sum()

    def along(x: Tensor) -> Tensor:
        return hvp(f, (x,), (v,))

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


def drawn_istft(rng: random.Random) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Draw a spectrum, a window and the other arguments; torch refuses some of the calls."""
    n_fft = rng.choice([4, 5, 8])
    shape = [rng.choice([n_fft // 2 + 1] * 4 + [n_fft]), rng.choice([1, 3, 4])]
    x = torch.randn(*([2] if rng.random() < 0.3 else []), *shape, dtype=torch.complex128)
    width = rng.choice([n_fft, n_fft, 3])
    kinds: list[Callable[[int], Tensor]] = [torch.ones, torch.rand, torch.zeros, torch.hann_window]
    window = rng.choice(kinds)(width)
    choices: dict[str, list[Any]] = {
        "hop_length": [1, 2, 4, 0], "center": [True, False], "normalized": [True, False],
        "onesided": [True, False], "length": [None, 5, 100], "return_complex": [True, False],
    }  # fmt: skip
    options = {name: rng.choice(some) for name, some in choices.items() if rng.random() < 0.4}
    return x, window.double(), {"n_fft": n_fft, "win_length": width, **options}


def outcome(call: Callable[[], Tensor]) -> Tensor | None:
    try:
        return call()
    except (RuntimeError, IndexError):
        return None


@pytest.mark.filterwarnings("ignore")
def test_istft_of_a_batch_is_refused_where_that_of_an_example_is() -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        x, window, options = drawn_istft(rng)
        batched = rng.choice([(True, False), (False, True), (True, True)])
        bdim = rng.choice([0, -1])
        values = [
            torch.stack([y, 2 * y, 3 * y], bdim) if b else y
            for y, b in zip((x, window), batched, strict=True)
        ]

        def call(x: Tensor, window: Tensor, options: Any = options) -> Tensor:
            return torch.istft(x, window=window, **options)

        def looped(values: Any = values, batched: Any = batched, bdim: int = bdim) -> Tensor:
            pairs = zip(values, batched, strict=True)
            examples = [y.unbind(bdim) if b else [y] * 3 for y, b in pairs]
            return torch.stack([call(*each) for each in zip(*examples, strict=True)])

        transformed: Any = vmap(call, tuple(bdim if b else None for b in batched))
        if rng.random() < 0.3:
            transformed = specialize(transformed)
        want = outcome(looped)
        got = outcome(lambda: transformed(*values))  # noqa: B023
        place = f"seed {seed}: {x.shape}, {window}, {options}, batched {batched} at {bdim}"
        assert (got is None) == (want is None), place
        if got is not None:
            torch.testing.assert_close(got, want, msg=lambda m: f"{place}\n{m}")  # noqa: B023
