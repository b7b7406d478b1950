"""Reshapes: one program for all sizes with the same number of elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ConstraintViolation

# A function of a tensor and a number, the shape, and calls that one program serves.
CASES: dict[str, tuple[Callable[[Tensor, int], Any], Any, list[tuple[int, int]]]] = {
    "rows": (lambda x, k: x.reshape(k, -1), ["n", 2], [(4, 2), (4, 8), (4, 1), (3, 6), (8, 4)]),
    "columns": (lambda x, k: x.view(-1, k), ["n", 2], [(4, 2), (4, 8), (4, 1), (3, 3)]),
    "in the middle": (lambda x, k: x.view(2, -1, k), ["n", 4], [(4, 2), (2, 1), (3, 6)]),
    "none left out": (lambda x, k: x.view(k, x.shape[0] * 6 // k), ["n", 6], [(4, 3), (5, 1)]),
    "the same": (lambda x, k: x.reshape(x.shape[0], 6) * k, ["n", 6], [(4, 3), (2, 1)]),
    "one dim": (lambda x, k: x.reshape(-1) * k, ["n", 6], [(4, 3), (9, 1)]),
    "to and fro": (lambda x, k: x.view(-1).view(k, -1).view(x.shape), ["n", 2], [(4, 2), (4, 8)]),
    "a part": (lambda x, k: x[1:].reshape(k, -1), ["n", 4], [(5, 4), (3, 8)]),
    "copied": (lambda x, k: torch.view_copy(x, (k, -1)), ["n", 2], [(4, 2), (4, 8)]),
    "halves": (lambda x, k: x.reshape(2, -1) + k, [Dim("n", multiple_of=2), 3], [(4, 1), (6, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_program_for_all_sizes(name: str) -> None:
    f, shape, calls = CASES[name]
    g = specialize(f, {"x": Meta(shape), "k": int})
    for n, k in calls:
        x = torch.randn(n, shape[1])
        torch.testing.assert_close(g(x, k), f(x, k))
        assert g(x, k).stride() == f(x, k).stride()
    assert g.cache_info().programs == 1


def test_views_are_views() -> None:
    def f(x: Tensor, k: int) -> Tensor:
        x.view(k, -1)[0] += 1
        x.reshape(-1, k)[-1].zero_()
        return x * 2

    g = specialize(f, {"x": Meta(["n", 3]), "k": int})
    for n, k in ((8, 2), (8, 6), (7, 3)):
        x, y = torch.randn(2, n, 3).unbind()
        y.copy_(x)
        torch.testing.assert_close(g(x, k), f(y, k))
        torch.testing.assert_close(x, y)


def test_calls_that_torch_refuses_are_refused() -> None:
    g = specialize(lambda x, k: x.reshape(k, -1), {"x": Meta(["n", 2]), "k": int})
    for k in (2, -1, 0, 3, -2):
        x = torch.randn(4, 2)
        try:
            expected = x.reshape(k, -1)
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as caught:
                g(x, k)
            assert type(caught.value) is type(error)
        else:
            torch.testing.assert_close(g(x, k), expected)


def test_elements_out_of_order_are_as_torch_has_them() -> None:
    g = specialize(lambda x: x.T.reshape(-1, 2).add_(1), {"x": Meta(["n", 2])})
    x = torch.randn(4, 2)
    before = x.clone()
    torch.testing.assert_close(g(x), x.T.reshape(-1, 2) + 1)
    assert x.equal(before)


def test_equal_counts_are_required() -> None:
    with pytest.raises(ConstraintViolation) as caught:
        specialize(lambda x: x.view(8, 3), {"x": Meta(["n", 3])})(torch.randn(8, 3))
    assert f"  3*n == 24  (at {__file__}" in str(caught.value)
    assert "shape=[8, 3]" in str(caught.value)
    with pytest.raises(ConstraintViolation, match=r"2\*n == m"):
        specialize(lambda x, y: x.view(y.shape), {"x": Meta(["n", 2]), "y": Meta(["m"])})(
            torch.randn(4, 2), torch.randn(8)
        )


def test_that_it_goes_evenly_is_for_the_operator_to_check() -> None:
    g = specialize(lambda x: x.reshape(4, -1), {"x": Meta(["n", "m"])})
    for shape in ((8, 3), (3, 8), (2, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(g(x), x.reshape(4, -1))
    with pytest.raises(RuntimeError, match="invalid for input of size 9"):
        g(torch.randn(3, 3))
