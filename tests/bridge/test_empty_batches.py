"""Batches of no examples: the results are empty, with the shapes of one example's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tsfunc import grad, jvp, vmap

CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "fft": (torch.fft.fft, [(4,)]),
    "conv2d with a weight of each example": (F.conv2d, [(1, 2, 5, 5), (3, 2, 3, 3)]),
    "lstsq": (lambda a, b: tuple(torch.linalg.lstsq(a, b)), [(3, 2), (3, 1)]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [(4, 3, 3)]),
    "take": (lambda x: torch.take(x, torch.tensor([0, 3])), [(2, 3)]),
    "histc": (lambda x: torch.histc(x, 4, 0, 1), [(5,)]),
    "inverse": (torch.linalg.inv, [(3, 3)]),
    "sort": (lambda x: tuple(torch.sort(x, 0)), [(3, 2)]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bdim", [0, -1])
def test_the_results_are_empty(call: str, bdim: int) -> None:
    f, shapes = CALLS[call]
    one = f(*[torch.rand(shape) for shape in shapes])
    none = vmap(f, in_dims=bdim)(
        *[torch.rand(*s, 0) if bdim else torch.rand(0, *s) for s in shapes]
    )
    pairs = [(none, one)] if isinstance(one, Tensor) else list(zip(none, one, strict=True))
    for mine, example in pairs:
        assert mine.shape == (0, *example.shape) and mine.dtype is example.dtype


def test_gradients_of_an_empty_batch_are_empty() -> None:
    assert vmap(grad(lambda x: torch.fft.fft(x).abs().sum()))(torch.rand(0, 4)).shape == (0, 4)


def test_tangents_of_views_of_a_result() -> None:
    """The tangent has the memory layout of the result, even without elements."""

    def f(x: Tensor) -> Tensor:
        return jvp(torch.linalg.cond, (x,), (torch.ones_like(x),))[1]

    assert vmap(f)(torch.rand(0, 2, 5, 5)).shape == (0, 2)
    assert vmap(f, -1)(torch.rand(2, 5, 5, 0)).shape == (0, 2)


def test_gradients_of_batch_norm() -> None:
    """For no channels its kernel divides by zero, which ends the process."""

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, training=True).sum()

    found = vmap(grad(f, (0, 1)))(torch.rand(0, 4, 2, 3), torch.rand(0, 2))
    assert [x.shape for x in found] == [(0, 4, 2, 3), (0, 2)]


def test_unbatched_tensors_are_not_written() -> None:
    """The placeholder example has a copy of the tensor."""
    seen = torch.zeros(3)

    def f(x: Tensor) -> Tensor:
        own = seen.clone()
        own.index_add_(0, torch.tensor([0]), x)
        return own

    assert vmap(f)(torch.rand(0, 1)).shape == (0, 3)
    assert seen.equal(torch.zeros(3))


def test_calls_that_torch_refuses_for_each_example_are_refused() -> None:
    with pytest.raises(RuntimeError):
        vmap(torch.mm)(torch.rand(0, 2, 3), torch.rand(0, 2, 3))
