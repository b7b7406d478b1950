"""Random numbers of each example have torch's distributions (two samples, Kolmogorov-Smirnov)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.harness import Level, overload
from tsfunc.ops import distributions
from tsfunc.ops.philox import Philox
from tsfunc.ops.registry import find

SIZE = 20_000
Sample = Callable[[Philox, int], Tensor]


def draw(rows: int = 4) -> Philox:
    return Philox(Level(rows, "split"), torch.device("cpu"))


def distance(got: Tensor, want: Tensor) -> float:
    """Return the largest difference of the empirical distribution functions."""
    got, want = got.flatten().double().sort().values, want.flatten().double().sort().values
    points = torch.cat([got, want])
    below = [torch.searchsorted(x, points, right=True) / len(x) for x in (got, want)]
    return float((below[0] - below[1]).abs().max())


def alike(got: Tensor, want: Tensor) -> None:
    """True unless the test rejects, by chance once in 10,000 comparisons; the seeds are fixed."""
    n, m = got.numel(), want.numel()
    assert distance(got, want) < 2.23 * math.sqrt((n + m) / (n * m))


def constant(value: float) -> Tensor:
    return torch.full((4, SIZE // 4), value, dtype=torch.float64)


PLAIN: dict[str, tuple[Sample, Callable[[], Tensor]]] = {
    "uniform": (lambda d, n: distributions.uniform(d, n, torch.float32), lambda: torch.rand(SIZE)),
    "uniform of doubles": (
        lambda d, n: distributions.uniform(d, n, torch.float64),
        lambda: torch.rand(SIZE, dtype=torch.float64),
    ),
    "normal": (lambda d, n: distributions.normal(d, n, torch.float32), lambda: torch.randn(SIZE)),
    "normal of doubles": (
        lambda d, n: distributions.normal(d, n, torch.float64),
        lambda: torch.randn(SIZE, dtype=torch.float64),
    ),
    "exponential": (
        lambda d, n: distributions.exponential(d, n, torch.float32),
        lambda: torch.empty(SIZE).exponential_(),
    ),
    "cauchy": (
        lambda d, n: distributions.cauchy(d, n, torch.float32),
        lambda: torch.empty(SIZE).cauchy_(),
    ),
    "geometric": (
        lambda d, n: distributions.geometric(d, n, 0.2),
        lambda: torch.empty(SIZE).geometric_(0.2),
    ),
    "integers": (
        lambda d, n: distributions.integers(d, n, -5, 17),
        lambda: torch.randint(-5, 12, (SIZE,)),
    ),
    "integers of 64 bits": (
        lambda d, n: distributions.integers(d, n, -(1 << 63), 1 << 64),
        lambda: torch.empty(SIZE, dtype=torch.int64).random_(-(1 << 63), None),
    ),
    "integers of 50 bits": (
        lambda d, n: distributions.integers(d, n, 0, (1 << 50) + (1 << 49)),
        lambda: torch.randint(0, (1 << 50) + (1 << 49), (SIZE,)),
    ),
    "first of a permutation": (
        lambda d, n: torch.cat([distributions.permutation(d, 10) for _ in range(n // 10)]),
        lambda: torch.stack([torch.randperm(10) for _ in range(SIZE // 10)]),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_draws_have_the_moments_of_torchs(name: str) -> None:
    ours, theirs = PLAIN[name]
    got = ours(draw(), SIZE // 4)
    assert bool(got.isfinite().all())
    alike(got, theirs())


@pytest.mark.parametrize("shape", [0.05, 0.9, 1.0, 3.5, 200.0])
def test_gamma(shape: float) -> None:
    alpha = constant(shape)
    alike(distributions.gamma(draw(), alpha), torch.ops.aten._standard_gamma(alpha))


@pytest.mark.parametrize("rate", [0.0, 0.3, 9.9, 10.0, 35.5, 1e6])
def test_poisson(rate: float) -> None:
    rates = constant(rate)
    alike(distributions.poisson(draw(), rates), torch.poisson(rates))


@pytest.mark.parametrize("trials", [0, 1, 30, 1000, 100_000])
@pytest.mark.parametrize("chance", [0.0, 0.004, 0.3, 0.5, 0.97, 1.0])
def test_binomial(trials: int, chance: float) -> None:
    n, p = constant(float(trials)), constant(chance)
    got = distributions.binomial(draw(), n, p)
    assert bool(((got >= 0) & (got <= n)).all())
    alike(got, torch.binomial(n, p))


def test_each_element_has_parameters_of_its_own() -> None:
    """This holds for neighbours that are drawn by different methods, too."""
    rates = torch.tensor([0.0, 0.5, 9.0, 11.0, 500.0], dtype=torch.float64).repeat(4, 2000)
    got = distributions.poisson(draw(), rates).view(-1, 5)
    for i, rate in enumerate(rates[0, :5]):
        alike(got[:, i], torch.poisson(rate.expand(8000)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bounds_of_uniform_numbers(dtype: torch.dtype) -> None:
    got = distributions.uniform(draw(), 5000, dtype)
    assert got.dtype is dtype and float(got.min()) >= 0 and float(got.max()) < 1
    positive = distributions.open_uniform(draw(), 5000, dtype)
    assert float(positive.min()) > 0 and float(positive.max()) <= 1


def test_integers_are_the_upper_bits_of_a_product() -> None:
    """Python's integers compute the expected bits."""
    for low, span in [(0, 1), (-3, 7), (5, (1 << 32) + 1), (-(1 << 63), (1 << 64) - 1)]:
        torch.manual_seed(1)
        got = distributions.integers(draw(1), 50, low, span)[0].tolist()
        torch.manual_seed(1)
        words = draw(1).words(100)[0].tolist()
        bits = [(high << 32) + rest for high, rest in zip(words[:50], words[50:], strict=True)]
        assert got == [low + (b * span >> 64) for b in bits]


def test_multinomial() -> None:
    weights = torch.tensor([[0.0, 1.0, 2.0, 0.0, 5.0, 0.5, 0.0]]).repeat(4, 1)
    rule = find("aten::multinomial")
    assert rule is not None and rule.rule is not None
    op = overload("aten::multinomial")
    out, _ = rule.rule(op, Level(4, "split"), [0, None, None], [weights, 5000, True], {})
    alike(out, torch.multinomial(weights[0], SIZE, True))
    three = [rule.rule(op, Level(4, "split"), [0, None], [weights, 3], {})[0] for _ in range(2000)]
    got = torch.cat(three)
    want = torch.stack([torch.multinomial(weights[0], 3) for _ in range(8000)])
    for place in range(3):
        alike(got[:, place], want[:, place])
    assert bool((got.sort(1).values.diff(dim=1) > 0).all())
