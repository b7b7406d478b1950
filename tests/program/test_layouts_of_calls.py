"""Programs for open sizes agree with their functions for tensors of every memory layout."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType, grad, hessian, jacfwd, jvp, specialize
from tsfunc.errors import TypeCheckError

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "multiplied by 1": lambda x: x * 1,
    "divided by 1": lambda x: x / 1,
    "power 1": lambda x: x**1,
    "minus 0": lambda x: x - 0,
    "copied by to": lambda x: x.to(x.dtype, copy=True),
    "contiguous": lambda x: x.contiguous(),
    "cloned twice": lambda x: x.clone()[:].clone(),
    "itself": lambda x: x,
    "contiguous transpose": lambda x: x.t().contiguous(),
    "sin": lambda x: x.sin(),
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1).sin(),
    "as_strided": lambda x: torch.as_strided(x, (3, 2), (2, 1), 1).sin(),
    "a view's view": lambda x: x[1:].view(-1).sin(),
    "reshape": lambda x: x.reshape(-1).sin(),
    "linear": lambda x: x[None] @ torch.ones(x.shape[1], 2, dtype=x.dtype),
    "zeros_like": lambda x: torch.zeros_like(x).view(-1),
    "strides": lambda x: x.cos(),
    "view_as_complex": lambda x: torch.view_as_complex(x[:, :2]).abs(),
}


def drawn_tensor(draw: random.Random) -> Tensor:
    base = torch.randn(draw.randint(5, 8), draw.randint(8, 12), dtype=torch.float64)
    kind = draw.choice(["dense", "columns", "rows", "transposed", "both", "expanded", "later"])
    if kind == "columns":
        return base[:, : draw.randint(4, 7)]
    if kind == "rows":
        return base[:: draw.randint(1, 2)]
    if kind == "both":
        return base[1:, ::2]
    if kind == "later":
        return base[2:]
    if kind == "expanded":
        return base[:1].expand(4, -1)
    return base.t() if kind == "transposed" else base


def fresh_draw() -> random.Random:
    """Return a generator with a new seed, which is printed and also seeds torch."""
    seed = secrets.randbits(32)
    print("seed", seed)
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("copy", COPIES)
def test_programs_decide_by_layout_as_their_functions(copy: str, use: str) -> None:
    draw = fresh_draw()

    def f(x: Tensor) -> Tensor:
        return USES[use](COPIES[copy](x))

    of_loss = grad(lambda x: f(x).sin().sum())
    descriptors = {"x": MetaTensorType(["a", "b"])}
    program, derivative = specialize(f, descriptors), specialize(of_loss, descriptors)
    for _ in range(3):
        x = drawn_tensor(draw)
        try:
            expected = f(x)
        except RuntimeError:  # no view of this layout
            continue
        torch.testing.assert_close(program(x), expected, rtol=0, atol=0, check_stride=True)
        try:
            found = derivative(x)
        except TypeCheckError as error:  # torch's derivative depends on the strides and the offset
            assert use == "as_strided" and re.search("the strides of x|does not begin", str(error))
        else:
            torch.testing.assert_close(found, of_loss(x))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.t().sin(),
    "rows": lambda x: x[1:].cos(),
    "reshape": lambda x: x.reshape(-1).sin(),
    "unsqueezed": lambda x: x[:, None].exp(),
    "no view": lambda x: x.sin() * x,
}
PUSHED: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jvp of a jvp": lambda f: lambda x: jvp(lambda y: jvp(f, (y,), (x.sin(),)), (x,), (x.cos(),)),
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: f(x).sin().sum()),
    "jvp of grad": lambda f: lambda x: jvp(grad(lambda y: f(y).sin().sum()), (x,), (x * 2,)),
}


@pytest.mark.parametrize("pushed", PUSHED)
@pytest.mark.parametrize("view", VIEWS)
def test_tangents_have_the_layout_of_their_primals(view: str, pushed: str) -> None:
    """torch requires it of tensors that are viewed; a program's may have gaps in memory."""
    draw = fresh_draw()
    f = PUSHED[pushed](VIEWS[view])
    program = specialize(f, {"x": MetaTensorType(["a", "b"])})
    for _ in range(3):
        x = drawn_tensor(draw)
        if draw.random() < 0.5:
            # The tangent of a reshape compares the stride of a gap with the width.
            x = x[:, : draw.randint(3 if view == "reshape" else 1, x.shape[1])]
        torch.testing.assert_close(program(x), f(x))
