"""Samples of distributions for each example, computed from the random words of a ``Draw``.

Every function returns a row of ``count`` numbers for each example. Most samples follow from
uniform numbers by a formula. Poisson, binomial and gamma samples need rejection. The attempts of
an example are numbered and the first accepted one counts, so rejections of other examples change
nothing. The number of attempts is bounded: the chance that all attempts fail is below 1e-15. If
values can be read, sampling stops once every attempt has ended. Several attempts run at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.philox import Attempts, Philox

_WORD = 0xFFFFFFFF
_ATTEMPTS = 48
_AT_A_TIME = 8
_MANY = 4096  # above this number of values, one attempt at a time uses the device well

Words = Philox | Attempts
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are computed."""
    return torch.float64 if dtype is torch.float64 or not dtype.is_floating_point else torch.float32


def uniform(draw: Words, count: Any, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), with as many random bits as the significand of the dtype has."""
    digits = _DIGITS.get(dtype, 53)
    if digits <= 32:
        return (draw.words(count) >> (32 - digits)).to(dtype) * 2.0**-digits
    high, low = _word_pairs(draw, count)
    return ((high >> 5) * (1 << 26) + (low >> 6)).to(torch.float64) * 2.0**-53


def _word_pairs(draw: Words, count: Any) -> tuple[Tensor, Tensor]:
    """Return two random words for each number."""
    words = draw.words(2 * count)
    return words[..., :count], words[..., count:]


def bernoulli(draw: Words, count: Any, chance: Any) -> Tensor:
    """Return True with a probability, one number or one for each element. To 32 bits."""
    return (draw.words(count).to(torch.float64) + 0.5) * 2.0**-32 < chance


def open_uniform(draw: Words, count: Any, dtype: torch.dtype) -> Tensor:
    """Return numbers in (0, 1), in the dtype in which numbers of ``dtype`` are computed."""
    if compute_dtype(dtype) is torch.float64:
        return 1.0 - uniform(draw, count, torch.float64)
    # All 32 bits are used, because logarithms need small numbers.
    return (draw.words(count).to(torch.float32) + 0.5) * 2.0**-32


def normal(draw: Words, count: Any, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers, two for each pair of uniform numbers (Box and Muller)."""
    half = (count + 1) // 2
    radius = (-2 * open_uniform(draw, half, dtype).log()).sqrt()
    angle = 2 * math.pi * open_uniform(draw, half, dtype)
    both = torch.cat([radius * angle.cos(), radius * angle.sin()], -1)
    return both.narrow(-1, 0, count)


def exponential(draw: Words, count: Any, dtype: torch.dtype) -> Tensor:
    """Return exponential numbers of rate 1, never 0: multinomial divides its weights by them."""
    least = torch.finfo(compute_dtype(dtype)).eps / 2
    return (-open_uniform(draw, count, dtype).log()).clamp_min(least)


def cauchy(draw: Words, count: Any, dtype: torch.dtype) -> Tensor:
    """Return Cauchy numbers of median 0 and scale 1."""
    return (math.pi * (open_uniform(draw, count, dtype) - 0.5)).tan()


def geometric(draw: Philox, count: Any, chance: float) -> Tensor:
    """Return the numbers of trials up to the first success."""
    tries = open_uniform(draw, count, torch.float64).log() / math.log1p(-chance)
    return tries.ceil().clamp_min(1.0)


def integers(draw: Philox, count: Any, low: int, span: Any) -> Tensor:
    """Return integers in ``[low, low + span)``: the upper half of 64 random bits times the span.

    The span is an int, or a column with one for each example.
    """
    high_word, low_word = _word_pairs(draw, count)
    if isinstance(span, int) and span == 1 << 64:
        return (high_word << 32) + low_word + low
    span_high, span_low = span >> 32, span & _WORD
    first = low_word * span_low
    second, third = high_word * span_low, low_word * span_high
    middle = ((first >> 32) & _WORD) + (second & _WORD) + (third & _WORD)
    carried = ((second >> 32) & _WORD) + ((third >> 32) & _WORD) + (middle >> 32)
    return high_word * span_high + carried + low


def permutation(draw: Philox, count: Any) -> Tensor:
    """Return a random permutation: the sort order of random integers."""
    return integers(draw, count, -(1 << 63), 1 << 64).argsort(dim=1, stable=True)


def _all_done(done: Tensor) -> bool:
    """True if all attempts have ended. False if the values cannot be read."""
    return type(done) is Tensor and bool(done.all())


def _first_accepted(
    draw: Philox, propose: Callable[[Words], tuple[Tensor, Tensor]], otherwise: Tensor
) -> Tensor:
    """Return the first accepted proposal of each element, or ``otherwise`` if none is accepted.

    ``propose`` returns the proposals of several attempts, and a mask of those that are accepted.
    """
    many = type(otherwise) is Tensor and otherwise.numel() > _MANY
    step = 1 if many else _AT_A_TIME
    out, done = otherwise, torch.zeros_like(otherwise, dtype=torch.bool)
    for first in range(0, _ATTEMPTS, step):
        proposals, accepted = propose(draw.attempts(1, first, step))
        position = accepted.to(torch.int8).argmax(0, keepdim=True)
        is_accepted = accepted.any(0)
        out = torch.where(is_accepted & ~done, proposals.gather(0, position).squeeze(0), out)
        done = done | is_accepted
        if _all_done(done):
            break
    return out


def _count_arrivals(draw: Philox, gaps: Callable[[Words], Tensor], room: Tensor) -> Tensor:
    """Return how many successive gaps fit into ``room``, which holds at most 10 on average.

    The number of gaps per step does not depend on the batch, and so the rounding of sums does not.
    """
    end, number = torch.zeros_like(room), torch.zeros_like(room)
    for first in range(0, 64, _AT_A_TIME):
        ends = end + gaps(draw.attempts(2, first, _AT_A_TIME)).cumsum(0)
        fits = ends <= room
        number, end = number + fits.sum(0), ends[-1]
        if _all_done(~fits[-1]):
            break
    return number


def gamma(draw: Philox, shape: Tensor) -> Tensor:
    """Return gamma numbers of scale 1, in float64.

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).
    """
    count = shape.shape[1]
    small = shape < 1
    boost = open_uniform(draw, count, torch.float64) ** torch.where(small, 1 / shape, 0.0)
    d = torch.where(small, shape + 1, shape) - 1 / 3 + 0 * boost
    c = 1 / (9 * d).sqrt()

    def propose(words: Words) -> tuple[Tensor, Tensor]:
        x = normal(words, count, torch.float64)
        v = (1 + c * x) ** 3
        u = open_uniform(words, count, torch.float64)
        fits = u.log() < 0.5 * x * x + d - d * v + d * v.clamp_min(1e-300).log()
        return d * v, (v > 0) & fits

    return _first_accepted(draw, propose, d) * boost


def poisson(draw: Philox, rate: Tensor) -> Tensor:
    """Return Poisson numbers, in float64.

    Source: for rates of at least 10, Hörmann, "The transformed rejection method for generating
    Poisson random variables" (1993). Smaller rates count the arrivals in unit time.
    """
    count = rate.shape[1]
    few = rate < 10
    blank = torch.zeros_like(draw.examples, dtype=torch.float64).view(-1, 1)
    room = torch.where(few, rate, 0.0) + blank
    mean = torch.where(few, 10.0, rate) + blank
    if _all_done(~few):
        return _poisson_of_many(draw, mean)
    small = _count_arrivals(draw, lambda words: exponential(words, count, torch.float64), room)
    return small if _all_done(few) else torch.where(few, small, _poisson_of_many(draw, mean))


def _poisson_of_many(draw: Philox, mean: Tensor) -> Tensor:
    """Return Poisson numbers of means of at least 10."""
    count = mean.shape[1]
    b = 0.931 + 2.53 * mean.sqrt()
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    certain = 0.9277 - 3.6224 / (b - 2)

    def propose(words: Words) -> tuple[Tensor, Tensor]:
        u = uniform(words, count, torch.float64) - 0.5
        v = open_uniform(words, count, torch.float64)
        us = 0.5 - u.abs()
        k = ((2 * a / us + b) * u + mean + 0.43).floor()
        weight = (v * inverse_alpha / (a / (us * us) + b)).log()
        fits = weight <= k * mean.log() - mean - (k + 1).clamp_min(1.0).lgamma()
        possible = (k >= 0) & ~((us < 0.013) & (v > us))
        return k, ((us >= 0.07) & (v <= certain)) | (possible & fits)

    return _first_accepted(draw, propose, mean.floor())


def binomial(draw: Philox, trials: Tensor, chance: Tensor) -> Tensor:
    """Return binomial numbers, in float64.

    Source: for means of at least 10, Hörmann, "The generation of binomial random variates" (1993).
    Smaller means count the successes by the gaps between them.
    """
    count = max(trials.shape[1], chance.shape[1])
    blank = torch.zeros_like(draw.examples, dtype=torch.float64).view(-1, 1)
    p = torch.where(chance > 0.5, 1 - chance, chance) + blank
    n = trials + blank
    few = n * p < 10
    never = torch.where(p > 0, p, 0.5)

    def gaps(words: Words) -> Tensor:
        tries = (open_uniform(words, count, torch.float64).log() / torch.log1p(-never)).ceil()
        return torch.where(p > 0, tries.clamp_min(1.0), math.inf)

    number = n
    if not _all_done(~few):
        number = _count_arrivals(draw, gaps, torch.where(few, n, 0.0))
    if not _all_done(few):
        many = _binomial_of_many(draw, torch.where(few, 20.0, n), torch.where(few, 0.5, p))
        number = torch.where(few, number, many)
    return torch.where(chance > 0.5, n - number, number)


def _binomial_of_many(draw: Philox, n: Tensor, p: Tensor) -> Tensor:
    """Return binomial numbers of means of at least 10, with a probability of at most 0.5."""
    count = n.shape[1]
    spread = (n * p * (1 - p)).sqrt()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    alpha = (2.83 + 5.1 / b) * spread
    certain = 0.92 - 4.2 / b
    mode = ((n + 1) * p).floor()
    odds = (p / (1 - p)).log()
    most = (mode + 1).lgamma() + (n - mode + 1).lgamma()

    def propose(words: Words) -> tuple[Tensor, Tensor]:
        u = uniform(words, count, torch.float64) - 0.5
        v = open_uniform(words, count, torch.float64)
        us = 0.5 - u.abs()
        k = ((2 * a / us + b) * u + n * p + 0.5).floor()
        possible = (k >= 0) & (k <= n)
        near = torch.where(possible, k, mode)
        weight = (v * alpha / (a / (us * us) + b)).log()
        fits = weight <= most - (near + 1).lgamma() - (n - near + 1).lgamma() + (k - mode) * odds
        return k, possible & (((us >= 0.07) & (v <= certain)) | fits)

    return _first_accepted(draw, propose, mode)
