"""Control flow in programs, on values whose memory layout differs from the traced one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import (
    checkpoint,
    cond,
    fori_loop,
    grad,
    jacfwd,
    jacrev,
    jvp,
    scan,
    specialize,
    switch,
    vjp,
    vmap,
    while_loop,
)

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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda y: y,
    "dense": lambda y: y * 1,
    "outer dims swapped": lambda y: (y.mT.transpose(0, 1) * 1).transpose(0, 1).mT,
    "inner dims swapped": lambda y: (y.mT * 1).mT,
    "permuted": lambda y: y.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expanded rows": lambda y: y[:1].expand_as(y),
    "expanded columns": lambda y: y.sum(-1, keepdim=True).expand_as(y),
    "with gaps": lambda y: torch.stack([y, y], -1)[..., 0],
}

# Functions that apply control flow to two functions from a tensor to one of its shape.
FLOWS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "cond": lambda f, g, x: cond(x.sum() > 0, f, g, x),
    "switch": lambda f, g, x: switch((x.sum() > 0).long(), [f, g, torch.cos], x),
    "while_loop": lambda f, g, x: while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, g(s[1])), (x.sum().long() * 0, f(x))
    )[1],
    "while_loop without steps": lambda f, g, x: while_loop(
        lambda s: s[0] < 0, lambda s: (s[0] + 1, g(s[1])), (x.sum().long() * 0, f(x))
    )[1],
    "fori_loop": lambda f, g, x: fori_loop(0, 2, lambda i, c: g(c), f(x)),
    "carry of scan": lambda f, g, x: scan(lambda c, _: (g(c), c.sum()), f(x), None, length=2)[0],
    "rows of scan": lambda f, g, x: scan(lambda c, r: (g(c) + r, f(c)), f(x), x[0, 0])[1][-1],
    "checkpoint": lambda f, g, x: checkpoint(lambda y: g(f(y)))(x),
    "nested": lambda f, g, x: cond(
        x.sum() > 0,
        lambda: cond(x[0].sum() > 0, f, g, x),
        lambda: fori_loop(0, 2, lambda i, c: g(c), x),
    ),
}

USES: list[Callable[[Tensor], Tensor]] = [
    lambda z: z,
    lambda z: z.reshape(-1),
    lambda z: z.flatten(1),
    lambda z: z.permute(2, 1, 0).flatten(1),
    lambda z: z.unflatten(2, (2, 2)).flatten(0, 1),
    lambda z: z.clone().mul_(2).reshape(-1),
]

OUTER: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](f(x).cos()),
    "vmap": lambda f: lambda x: vmap(f, 2, 1)(torch.stack([x, -x, x * 2], 2)),
    "vmap of jvp": lambda f: lambda x: vmap(OUTER["jvp"](f), 3, 1)(torch.stack([x, -x], 3)),
    "jvp of vmap": lambda f: lambda x: OUTER["jvp"](vmap(f, 0, 1))(torch.stack([x, -x])),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(lambda x: f(x).sin().sum())),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_results_of_control_flow_lie_in_memory_in_any_way(flow: str) -> None:
    """Bodies return results with different strides; the program agrees with its function."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(4):
        first, second = rng.choices(list(LAYOUTS), k=2)
        outer = rng.choice(list(OUTER))
        use = rng.randrange(len(USES))
        print(first, second, outer, use)

        def f(x: Tensor, first: str = first, second: str = second, use: int = use) -> Any:
            return USES[use](FLOWS[flow](LAYOUTS[first], LAYOUTS[second], x))

        changed = OUTER[outer](f)
        program = specialize(changed)
        x = torch.randn(2, 3, 4, dtype=torch.float64)
        for given in (x, -x):
            torch.testing.assert_close(program(given), changed(given))
