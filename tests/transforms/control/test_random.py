"""Random numbers in bodies: a program draws as its function does, and derivatives draw no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tsfunc import cond, grad, grad_and_value, jacrev, jvp, scan, specialize, vmap, while_loop

X = torch.linspace(0.5, 2.5, 5)


def _scan(x: torch.Tensor) -> Any:
    return scan(lambda c, row: (c + row * row * torch.rand(()), None), torch.zeros(()), x)[0]


def _cond(x: torch.Tensor) -> Any:
    return cond(x.sum() > 0, lambda: (x.sin() * torch.rand(5)).sum(), lambda: x.sum())


def _while(x: torch.Tensor) -> Any:
    return while_loop(lambda c: c.sum() < 40, lambda c: c * (1 + torch.rand(())), x).sum()


def _dropout(x: torch.Tensor) -> Any:
    def step(c: Any, row: Any) -> Any:
        return torch.nn.functional.dropout(c * row, 0.5), None

    return scan(step, torch.ones(6), x)[0].sum()


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "grad_and_value": grad_and_value,
    "grad(grad)": lambda f: grad(lambda x: grad(f)(x).sin().sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jvp(grad)": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),)),
    "jacrev": jacrev,
    "vmap(grad)": lambda f: lambda x: vmap(grad(f), randomness="same")(torch.stack([x, x * 2])),
}


@pytest.mark.parametrize("f", [_scan, _cond, _while, _dropout])
@pytest.mark.parametrize("column", COLUMNS)
def test_derivatives_of_programs_have_the_numbers_of_their_calls(f: Any, column: str) -> None:
    ours = COLUMNS[column](f)
    torch.manual_seed(3)
    expected = ours(X)
    after = torch.rand(2)
    torch.manual_seed(3)
    torch.testing.assert_close(specialize(ours)(X), expected)
    torch.testing.assert_close(torch.rand(2), after)
