"""A program as a torch.fx.GraphModule has the same results in the same grad modes."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import cond, specialize, vmap

WEIGHT = torch.nn.Parameter(torch.randn(4, 2))


def layer(x: Tensor, scale: float) -> dict[str, Tensor]:
    return {"out": (x @ WEIGHT).relu() * scale * torch.arange(2), "total": x.sum() / x.shape[0]}


def test_plain_case() -> None:
    f = specialize(layer, {"x": Meta(["n", 4])})
    f(torch.ones(3, 4), 2.0)
    module = f.graph_module
    assert isinstance(module, torch.fx.GraphModule)
    for n in (2, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(list(module(x)), list(layer(x, 2.0).values()))


def test_tensors_read_from_outside_are_its_state() -> None:
    f = specialize(layer)
    f(torch.ones(3, 4), 2.0)
    module = f.graph_module
    assert next(module.parameters()) is WEIGHT and len(list(module.buffers())) == 1


def test_unused_inputs_are_accepted() -> None:
    f = specialize(lambda x, y, z: y.sin())
    x = torch.ones(3)
    f(x, x, x)
    torch.testing.assert_close(f.graph_module(x, 2 * x, x)[0], (2 * x).sin())


@pytest.mark.parametrize("mode", [True, False])
def test_blocks_without_gradients(mode: bool) -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            a = x.sin()
        b = x.cos()
        with torch.no_grad():
            c = b.exp()
        return a * b + c

    g = specialize(f)
    x = torch.ones(3, requires_grad=True)
    g(x)
    with torch.set_grad_enabled(mode):
        out = g.graph_module(x)[0]
        assert torch.is_grad_enabled() is mode
    assert out.requires_grad is mode
    if mode:
        (got,) = torch.autograd.grad(out.sum(), x)
        (want,) = torch.autograd.grad(f(x).sum(), x)
        torch.testing.assert_close(got, want)


def test_writes_and_control_flow() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return vmap(lambda v: cond(v.sum() > 0, torch.sin, torch.cos, v))(x)

    g = specialize(f)
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    g(x.clone())
    a, b = x.clone(), x.clone()
    torch.testing.assert_close([g.graph_module(a)[0], a], [f(b), b])
