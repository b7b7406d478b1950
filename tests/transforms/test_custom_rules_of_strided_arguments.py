"""Rules of custom functions take views of mapped arguments that begin inside of larger tensors.

Forward mode compares the layouts of a primal and of its tangent, the storage offsets included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "x[:]": lambda x: x[:],
    "x[1:]": lambda x: x[1:],
    "x.mT": lambda x: x.mT,
    "x.narrow": lambda x: x.narrow(0, 1, 2),
    "x.diagonal": lambda x: x.diagonal(),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "part of the first dim": lambda x: torch.stack([x.cos(), x]).flatten(0, 1)[len(x) :],
    "every second of the last dim": lambda x: torch.stack([x.cos(), x], -1).flatten(-2)[..., 1::2],
    "transposed part": lambda x: torch.stack([x.cos(), x])[1].mT.contiguous().mT[..., 0:],
}

Function = Callable[..., Tensor]


def _custom_jvp(function: Function) -> Function:
    custom: Any = tsfunc.custom_jvp(function)
    custom.defjvp(lambda primals, tangents: tsfunc.jvp(function, primals, tangents))
    return custom


def _custom_vjp(function: Function) -> Function:
    custom: Any = tsfunc.custom_vjp(function)
    custom.defvjp(
        lambda *args: (function(*args), args),
        lambda args, cotangent: tsfunc.vjp(function, *args)[1](cotangent),
    )
    return custom


RULES: dict[str, Callable[[Function], Function]] = {
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
}

TOWERS: dict[str, Callable[[Any, Function], Callable[[Tensor, Tensor], Tensor]]] = {
    "grad(vmap(grad))": lambda lib, f: lib.grad(
        lambda x, y: (
            lib.vmap(lib.grad(lambda a, b: f(a, b).sin().sum(), 1), (None, 1))(x, y).sin().sum()
        ),
        argnums=1,
    ),
    "grad(vmap(jacfwd))": lambda lib, f: lib.grad(
        lambda x, y: lib.vmap(lib.jacfwd(f), (None, 1))(x, y).sin().sum(), argnums=1
    ),
    "grad(vmap(vmap))": lambda lib, f: lib.grad(
        lambda x, y: (
            lib.vmap(lambda y: lib.vmap(f, (0, None))(torch.stack([x, x * 2]), y), 1)(y).sin().sum()
        ),
        argnums=1,
    ),
    "jacfwd(vmap)": lambda lib, f: lib.jacfwd(lambda x, y: lib.vmap(f, (None, 1))(x, y), argnums=1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("rule", RULES)
def test_rules_take_views_of_parts_of_tensors(
    rule: str, tower: str, layout: str, view: str
) -> None:
    """A custom function has the derivatives of the function itself, as torch.func computes them."""
    generator = torch.Generator().manual_seed(3)
    x, y = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 2, 3))
    )

    def function(a: Tensor, b: Tensor) -> Tensor:
        return a * VIEWS[view](b).sin().sum()

    y = LAYOUTS[layout](y)
    expected = TOWERS[tower](torch.func, function)(x, y)
    got = TOWERS[tower](tsfunc, RULES[rule](function))(x, y)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tracers_have_the_storage_offset_of_their_value(layout: str) -> None:
    """The offset is the same for an argument, the operand of a rule, and an alias."""
    y = LAYOUTS[layout](torch.randn(3, 2, 3, dtype=torch.float64))
    offsets = []

    def function(a: Tensor) -> Tensor:
        offsets.append(a.storage_offset())
        return a.sin()

    def example(a: Tensor) -> Tensor:
        offsets.append(a.storage_offset())
        return _custom_vjp(function)(a)

    tsfunc.grad(lambda y: tsfunc.vmap(example, 1)(y).sum())(y)
    assert set(offsets) == {y.storage_offset()}
