"""Tables of transforms that parametrize the laws of ``docs/semantics.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tsfunc import (
    checkpoint,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    specialize,
    vjp,
    vmap,
)

X = torch.arange(6.0).reshape(3, 2) + 1

Function = Callable[..., Any]
Transform = Callable[[Function], Function]


def _sum(f: Function) -> Function:
    return lambda x: f(x).sum()


REVERSE: dict[str, Transform] = {
    "grad": lambda f: grad(_sum(f)),
    "grad_and_value": lambda f: grad_and_value(_sum(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones_like(x)),
    "jacrev": jacrev,
    "hessian": hessian,
    "linearize": lambda f: lambda x: linearize(f, x)[0],
    "vmap(grad)": lambda f: vmap(grad(_sum(f))),
    "grad(vmap)": lambda f: grad(_sum(vmap(f))),
}
OTHERS: dict[str, Transform] = {
    "vmap": vmap,
    "vmap(vmap)": lambda f: vmap(vmap(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": jacfwd,
    "checkpoint": checkpoint,
}
EAGER = REVERSE | OTHERS
PROGRAMS: dict[str, Transform] = {
    "specialize": specialize,
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "specialize(grad)": lambda f: specialize(grad(_sum(f))),
    "vmap(specialize)": lambda f: vmap(specialize(f)),
}
SAME: dict[str, Transform] = {
    "specialize": specialize,
    "checkpoint": checkpoint,
    "vjp": lambda f: lambda x: vjp(f, x)[0],
    "specialize(vjp)": lambda f: specialize(lambda x: vjp(f, x)[0]),
}
"""The transforms that return what the function returns."""

BATCHED: dict[str, Transform] = {
    "vmap": vmap,
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "vmap(specialize)": lambda f: vmap(specialize(f)),
    "vmap(checkpoint)": lambda f: vmap(checkpoint(f)),
}


def every(*tables: dict[str, Any]) -> pytest.MarkDecorator:
    """Return the mark that parametrizes a test by the values of tables."""
    values = {name: value for table in tables for name, value in table.items()}
    return pytest.mark.parametrize("transform", values.values(), ids=values.keys())
