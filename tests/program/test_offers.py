"""Descriptors that errors offer imply the recorded conditions on named dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.program.test_constraints import r, refused
from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.errors import DescriptorViolation


@pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")  # the sizes differ on purpose
@pytest.mark.parametrize(
    ("asks", "sizes"),
    [
        (lambda a, b, c: a < 5 % a, (3, 5, 7)),  # only a trial shows that it never is
        (lambda a, b, c: (a // b < c, (a - c) % a != 3), (4, 9, 7)),  # sizes beside an open dim
        (lambda a, b, c: ((9 + a) // a < b + 9, b - c + 8 - c != b), (9, 2, 6)),
        (lambda a, b, c: (a % b % 5 != c, b - a == a, c - b == b), (3, 4, 7)),
        (lambda a, b, c: (b * 9 >= a, b + c >= a + b), (9, 3, 7)),
    ],
)
def test_the_suggested_descriptors_need_no_further_fact(
    asks: Callable[[int, int, int], Any], sizes: tuple[int, int, int]
) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        found = asks(*x.shape, *y.shape)
        answers = [bool(each) for each in (found if isinstance(found, tuple) else (found,))]
        return x.sum() * 0 + y.sum() * 0 + sum(2.0**i for i, yes in enumerate(answers) if yes)

    a, b, c = sizes
    _, offered = refused(f, {"x": Meta(["a", "b"]), "y": Meta(["c"])}, r(a, b), r(c))
    g = specialize(f, offered)
    torch.testing.assert_close(g(r(a, b), r(c)), f(r(a, b), r(c)))
    for i, j, k in itertools.product((2, 11), repeat=3):
        x, y = r(i, j), r(k)
        if fits_both(g, x, y):
            torch.testing.assert_close(g(x, y), f(x, y))


def fits_both(g: Any, x: Tensor, y: Tensor) -> bool:
    try:
        g.target.contract({"x": x, "y": y})
    except DescriptorViolation:
        return False
    return True
