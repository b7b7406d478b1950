"""Results of bodies for which Inductor would reuse the memory of the bodies' inputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import cond, scan, specialize, while_loop

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's own warnings during compilation
    pytest.mark.skipif(shutil.which("gcc") is None, reason="Inductor needs gcc"),
]

X = torch.arange(9.0, dtype=torch.float64).view(3, 3).sin()
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda c: c + torch.zeros_like(c),
    "ones": lambda c: c * torch.ones_like(c),
    "view": lambda c: (c.view(-1) - torch.zeros(9, dtype=c.dtype)).view(3, 3),
}


def _while(c: Tensor, d: Tensor, same: Any) -> Any:
    def step(state: Any) -> Any:
        n, c, d = state
        return n + 1, (c + d).cos(), same(d)

    return while_loop(lambda state: state[0] < 3, step, (torch.tensor(0), c, d))[1:]


def _scan(c: Tensor, d: Tensor, same: Any) -> Any:
    def step(carry: Any, row: Tensor) -> Any:
        c, d = carry
        return ((c + d).cos() + row, same(d)), row

    return scan(step, (c, d), torch.ones(3, dtype=torch.float64))[0]


def _cond(c: Tensor, d: Tensor, same: Any) -> Any:
    return cond(c.sum() > 0, lambda: ((c + d).cos(), same(d)), lambda: (d.cos(), same(c)))


@pytest.mark.parametrize(
    ("flow", "same"),
    [
        (_cond, "zeros"),
        pytest.param(_cond, "ones", marks=pytest.mark.slow),
        pytest.param(_while, "zeros", marks=pytest.mark.slow),
        pytest.param(_scan, "view", marks=pytest.mark.slow),
    ],
)
def test_a_result_that_equals_an_input_has_memory_of_its_own(flow: Any, same: str) -> None:
    def f(x: Tensor) -> Any:
        z = x.sin()
        c, d = flow(x.clone(), z, SAME[same])
        e = d * 2 + c
        g, _ = flow(e, c, torch.sin)
        return g, z.cos() + g, e.exp()

    torch.testing.assert_close(specialize(f, backend="inductor")(X), f(X))
