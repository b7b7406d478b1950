"""Splits along named dims, by a number of parts from which the lengths follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ConstraintViolation

# A function, the first dim, and lengths of it that one program serves.
CASES: dict[str, tuple[Callable[[Tensor], Any], Any, list[int]]] = {
    "halves": (lambda x: x.chunk(2), "n", [9, 2, 3, 4, 100, 1, 0]),
    "thirds": (lambda x: x.chunk(3), Dim("n", min=5), [9, 5, 6, 7, 100]),
    "thirds of the other dim": (lambda x: x.chunk(3, -1), "n", [9, 2, 0]),
    "as many as go evenly": (lambda x: x.chunk(6), Dim("n", multiple_of=6), [12, 6, 60, 0]),
    "without a check": (lambda x: x.unsafe_chunk(2), "n", [9, 2, 3]),
    "as even as it goes": (lambda x: x.tensor_split(4), "n", [9, 2, 3, 4, 10, 11, 1, 0]),
    "by a length": (lambda x: x.split(4), Dim("n", min=9, max=12), [9, 12, 10]),
    "by a length of multiples": (lambda x: x.split(4)[0], Dim("n", min=5, max=8), [8, 5]),
    "unsafely": (lambda x: x.unsafe_split(4), Dim("n", min=9, max=12), [9, 12]),
    "copied": (lambda x: torch.split_copy(x, 4), Dim("n", min=9, max=12), [9, 12]),
    "columns": (lambda x: x.unbind(1), "n", [9, 2, 1, 0]),
    "columns, copied": (lambda x: torch.unbind_copy(x, 1), "n", [9, 2]),
    "parts of parts": (lambda x: x[1:].chunk(2)[1].tensor_split(2), "n", [9, 7, 12]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_for_all_lengths(name: str) -> None:
    f, dim, lengths = CASES[name]
    g = specialize(f, {"x": Meta([dim, 5])})
    for n in lengths:
        x = torch.randn(n, 5)
        torch.testing.assert_close(g(x), f(x))
        assert all(a.stride() == b.stride() for a, b in zip(g(x), f(x), strict=True) if n > 1)
    small = sum(n < 2 for n in lengths)
    assert g.cache_info().programs <= 1 + small


@pytest.mark.parametrize(
    ("f", "constraint", "dim"),
    [
        (lambda x: x.unbind(), "n == 9", "9"),
        (lambda x: [row.sum() for row in x], "n == 9", "9"),
        (lambda x: x.split(4), "(n + 3) // 4 == 3", "Dim('n', min=9, max=12)"),
        (lambda x: x.chunk(3), "n > 4", "Dim('n', min=5)"),
        (lambda x: x.chunk(9), "n % 9 == 0", "Dim('n', multiple_of=9)"),
        (
            lambda x: x.chunk(5),
            "(n + ((n + 4) // 5) - 1) // ((n + 4) // 5) == 5",
            "Dim('n', min=9, max=10)",
        ),
    ],
    ids=["unbind", "for", "split", "chunk", "chunks of one", "chunk of few"],
)
def test_the_number_of_parts_is_guarded(
    f: Callable[[Tensor], Any], constraint: str, dim: str
) -> None:
    with pytest.raises(ConstraintViolation) as caught:
        specialize(f, {"x": Meta(["n", 5])})(torch.randn(9, 5))
    assert f"  {constraint}  (at {__file__}" in str(caught.value)
    assert f"shape=[{dim}, 5]" in str(caught.value)


def test_views_are_views() -> None:
    def f(x: Tensor) -> Tensor:
        for part in x.tensor_split(3):
            part += 1
        x.chunk(2)[1].zero_()
        x.unbind(1)[0].fill_(7)
        return x * 2

    g = specialize(f, {"x": Meta(["n", 3])})
    for n in (7, 4):
        x, y = torch.randn(2, n, 3).unbind()
        y.copy_(x)
        torch.testing.assert_close(g(x), f(y))
        torch.testing.assert_close(x, y)


def test_many_parts_in_a_dim_that_stands_several_times() -> None:
    """It took minutes: each part was traced for sizes of a thousand, too."""
    with pytest.raises(ConstraintViolation, match="n == 9"):
        specialize(lambda x: x.unbind(), {"x": Meta(["n", "n", "n"])})(torch.randn(9, 9, 9))
