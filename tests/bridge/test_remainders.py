"""NOTE [constraints from remainders] in ``bridge/sizes/bounds``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sympy import Eq, Ge, Gt, Le, Lt, Ne
from torch import Tensor
from torch.nn import functional as F
from torch.utils._sympy.functions import FloorDiv, PythonMod

from tests.bridge.size_expressions import H, W, expressions
from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.bridge.sizes.bounds import holds_by_remainders

SIZES = {"h": (2, 1), "w": (2, 1)}


def padded(size: Any, step: int) -> Any:
    return size + PythonMod(-size, step)


@pytest.mark.parametrize(
    "constraint",
    [
        Eq(4 * FloorDiv(padded(H, 4), 4), padded(H, 4)),
        Eq(PythonMod(padded(H, 4), 4), 0),
        Eq(padded(H, 4) * padded(W, 3),
           12 * FloorDiv(padded(H, 4), 4) * FloorDiv(padded(W, 3), 3)),
        Ge(4 * FloorDiv(H + 3, 4), H),
        Lt(padded(H, 4), H + 4),
        Le(2 * FloorDiv(H, 2), H),
        Ne(PythonMod(H, 3), W + 3),
        Gt(FloorDiv(FloorDiv(H + 7, 3), 3) * W, 0),
        Le(FloorDiv(FloorDiv(H, 2) + 1, 3), FloorDiv(H + 2, 6)),
    ],
)  # fmt: skip
def test_true_facts_are_proved(constraint: Any) -> None:
    assert holds_by_remainders(constraint, SIZES)


def test_sizes_go_by_the_step_of_their_dim() -> None:
    assert holds_by_remainders(Eq(PythonMod(H, 4), 0), {"h": (2, 4)})
    assert not holds_by_remainders(Eq(PythonMod(H, 8), 0), {"h": (2, 4)})
    assert holds_by_remainders(Ge(FloorDiv(H, 3), 3), {"h": (9, 1)})
    assert not holds_by_remainders(Ge(FloorDiv(H, 3), 3), {"h": (8, 1)})


@given(expressions(), expressions(), st.sampled_from([Eq, Ne, Ge, Gt, Le, Lt]))
def test_proved_facts_hold(one: Any, other: Any, relation: Any) -> None:
    constraint = relation(one, other)
    if constraint.free_symbols and holds_by_remainders(constraint, SIZES):
        for h, w in itertools.product(range(2, 12), range(2, 12)):
            assert constraint.subs({H: h, W: w})


def test_windows_of_padded_inputs() -> None:
    def windows(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = F.pad(x, (0, 0, 0, -w % 4, 0, -h % 4))
        rows, columns = x.shape[1] // 4, x.shape[2] // 4
        parts = x.view(b, rows, 4, columns, 4, c)
        return parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)

    f = specialize(windows, {"x": Meta(["b", "h", "w", 3])})
    for b, h, w in ((2, 5, 8), (3, 9, 12), (1, 4, 7)):
        x = torch.randn(b, h, w, 3)
        torch.testing.assert_close(f(x), windows(x))
    assert f.cache_info().programs == 1


def test_dims_of_few_steps() -> None:
    f = specialize(lambda x: x.view(-1, 6), {"x": Meta([Dim("n", multiple_of=3), 4])})
    for n in (3, 6, 9):
        torch.testing.assert_close(f(torch.ones(n, 4)), torch.ones(n * 4 // 6, 6))
