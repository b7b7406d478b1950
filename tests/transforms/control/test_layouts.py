"""Control flow in programs, on values that lie in memory otherwise than the trace has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tsfunc import cond, grad, jvp, scan, specialize, while_loop

X = torch.linspace(-1, 2, 9, dtype=torch.float64).view(3, 3)
WEIGHTS = torch.arange(9.0, dtype=torch.float64)


def _branches(x: torch.Tensor) -> Any:
    found = cond(x.sum() > 0, lambda: torch.linalg.inv(x.T @ x + torch.eye(3)), lambda: x.cos())
    return (found.reshape(-1) * WEIGHTS).sum()


def _scan(x: torch.Tensor) -> Any:
    last, rows = scan(lambda c, _: (c.T.sin(), c.reshape(-1)), x, length=3)
    return (last.reshape(-1) * rows.sum(0)).sum()


def _while(x: torch.Tensor) -> Any:
    def step(state: Any) -> Any:
        n, c = state
        return n + 1, c.T.sin() + (c.reshape(-1) * WEIGHTS).sum()

    last = while_loop(lambda s: s[0] < 3, step, (x.sum().long() * 0, x))[1]
    return (last.reshape(-1) * WEIGHTS).sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": grad,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "grad(grad)": lambda f: grad(lambda x: (grad(f)(x).reshape(-1).sin() * WEIGHTS).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", [_branches, _scan, _while])
def test_programs_reshape_other_layouts(f: Any, transform: str) -> None:
    changed = TRANSFORMS[transform](f)
    program = specialize(changed)
    for x in (X, X.T, -X):
        torch.testing.assert_close(program(x), changed(x))


def test_a_view_that_is_written_through_stays_one() -> None:
    def f(x: torch.Tensor) -> Any:
        found = cond(x.sum() > 0, lambda: x.sin(), lambda: x.cos())
        found.view(-1)[0] = 5
        return found

    program = specialize(lambda x: jvp(f, (x,), (x,)))
    for x in (X, -X):
        torch.testing.assert_close(program(x), jvp(f, (x,), (x,)))
