"""Programs of ``jvp`` are differentiated like their functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tsfunc import jvp, specialize, vmap

TWICE_DIFFERENTIATED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm with weights": lambda x: F.batch_norm(x, None, None, x[0], x[1], training=True),
    "instance norm": lambda x: F.instance_norm(x[None]),
    "group norm": lambda x: F.group_norm(x[None], 2),
    "root mean square norm": lambda x: F.rms_norm(x, (4,)),
    "gated unit": lambda x: F.glu(x, 0),
    "softmax": lambda x: x.softmax(0),
    "logarithmic softmax": lambda x: x.log_softmax(-1),
    "product": lambda x: x.cumprod(0),
    "inverse": torch.linalg.inv,
    "factor": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)),
}


@pytest.mark.parametrize("name", TWICE_DIFFERENTIATED)
def test_programs_of_tangents_are_differentiated(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, t = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator)

    def loss(x: Tensor) -> Tensor:
        return jvp(TWICE_DIFFERENTIATED[name], (x,), (t,))[1].sin().sum()

    steps = 1e-5 * torch.eye(16, dtype=torch.float64).view(16, 4, 4)
    want = torch.stack([loss(x + step) - loss(x - step) for step in steps]).view(4, 4) / 2e-5
    program = specialize(loss)
    leaf = x.clone().requires_grad_()
    for got in (
        tsfunc.grad(loss)(x),
        tsfunc.grad(program)(x),
        tsfunc.jacfwd(program)(x),
        vmap(tsfunc.grad(program))(x[None])[0],
        torch.autograd.grad(program(leaf), leaf)[0],
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
