"""A trace reads tensors that a function computes from plain numbers alone, as eager code does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import MetaTensorType as Meta
from tsfunc import cond, fori_loop, grad, jvp, specialize, vmap
from tsfunc.errors import DataDependentError


def _checked(x: Tensor) -> Tensor:
    times = torch.linspace(0, 1, 5)
    if not (times[1:] > times[:-1]).all():
        raise ValueError("the times must increase")
    return x * times[2]


def _searched(x: Tensor) -> Tensor:
    times = torch.arange(6, dtype=torch.float64) / 5
    k = 0
    while times[k] < 0.5:
        k += 1
    return x + k


def _steps(x: Tensor) -> Tensor:
    for start, end in zip(*torch.linspace(0, 1, 4).unfold(0, 2, 1).unbind(1), strict=True):
        width = end - start
        x = x + float(width) * x.sin() if width > 0.1 else x
    return x


def _of_literals(x: Tensor) -> Tensor:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    inverse = weights @ weights.T
    return x * inverse.det().item() + int(inverse.argmax()) + bool((weights == 3).any())


def _of_results(x: Tensor) -> Tensor:
    values, places = torch.tensor([3.0, 1.0, 2.0]).sort()
    return x[places.tolist()] * values[0].item()


def _complex(x: Tensor) -> Tensor:
    return x * complex(torch.tensor([1 + 2j]).exp()[0]).real


def _as_index(x: Tensor) -> Tensor:
    return x[int(torch.full((1,), 2.5).floor().item())].expand(3)


def _chosen_type(x: Tensor) -> Tensor:
    return x if torch.ones(2).mean() == 1 else x.to(torch.int64)


FUNCTIONS = [
    _checked, _searched, _steps, _of_literals, _of_results, _complex, _as_index, _chosen_type,
]  # fmt: skip

TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "specialize": specialize,
    "named": lambda f: specialize(f, {"x": Meta([3])}),
    "of vmap": lambda f: lambda x: specialize(vmap(f))(x.expand(2, 3))[1],
    "in vmap": lambda f: lambda x: vmap(specialize(f))(x.expand(2, 3))[1],
    "of grad": lambda f: specialize(grad(lambda x: f(x).square().sum())),
    "of jvp": lambda f: specialize(lambda x: jvp(f, (x,), (x.cos(),))[1]),
}
EXPECTED: dict[str, Callable[[Any], Any]] = {
    "of grad": lambda f: grad(lambda x: f(x).square().sum()),
    "of jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
}


@pytest.mark.parametrize("way", TRANSFORMED)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_numbers_that_are_computed_of_constants_are_read(f: Any, way: str) -> None:
    for x in torch.randn(2, 3, dtype=torch.float64):
        expected = EXPECTED.get(way, lambda f: f)(f)(x)
        torch.testing.assert_close(TRANSFORMED[way](f)(x), expected)


BODIES: dict[str, Callable[[Any], Any]] = {
    "loop": lambda f: lambda x: fori_loop(0, 3, lambda i, x: f(x).sin(), x),
    "branch": lambda f: lambda x: cond(x[0] > 0, lambda x: f(x).sin(), torch.cos, x),
    "nested": lambda f: (
        lambda x: tsfunc.map(
            lambda y: cond(y[0] > 0, lambda y: f(y).sin(), torch.cos, y), torch.stack((x, -x))
        )
    ),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_bodies_of_control_flow_read_them(f: Any, body: str, tmp_path: Path) -> None:
    x = torch.randn(3, dtype=torch.float64)
    g = BODIES[body](f)
    for h in (g, vmap(g, in_dims=None, axis_size=2), grad(lambda x: g(x).square().sum())):
        torch.testing.assert_close(specialize(h)(x), h(x))
    program = specialize(g)
    program(x)
    program.save(tmp_path / "f.tsf")
    torch.testing.assert_close(tsfunc.load(tmp_path / "f.tsf")(x), g(x))


def test_a_check_of_a_constant_raises_its_error() -> None:
    def f(x: Tensor, end: float) -> Tensor:
        if not torch.linspace(0, end, 3).diff().gt(0).all():
            raise ValueError("the times must increase")
        return x * end

    program = specialize(f)
    x = torch.ones(2)
    torch.testing.assert_close(program(x, 2.0), f(x, 2.0))
    with pytest.raises(ValueError, match="the times must increase"):
        program(x, -2.0)


def _drawn(x: Tensor) -> Tensor:
    return x if torch.rand(()) > 2 else -x


def _written(x: Tensor) -> Tensor:
    total = torch.zeros(())
    total += x.sum()
    return x if total > 0 else -x


CAPTURED = torch.linspace(0, 1, 3)


def _captured(x: Tensor) -> Tensor:
    return x if CAPTURED.sum() > 0 else -x


def _undefined(x: Tensor) -> Tensor:
    return x if torch.empty(3).sum() > 0 else -x


def _of_the_argument(x: Tensor) -> Tensor:
    return x if (x * torch.zeros(3)).sum() > 0 else -x


@pytest.mark.parametrize("f", [_drawn, _written, _captured, _undefined, _of_the_argument])
def test_a_number_that_may_differ_in_another_call_is_refused(f: Any) -> None:
    for g in (f, BODIES["loop"](f)):
        with pytest.raises(DataDependentError, match="a trace has no data"):
            specialize(g)(torch.ones(3))


def test_a_choice_in_torchscript_is_refused_without_names_of_torch() -> None:
    source = """
def halved(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x / 2
    return x
"""
    halved: Any = torch.jit.CompilationUnit(source).halved
    with pytest.raises(DataDependentError) as raised:
        specialize(lambda x: halved(x) + 1)(torch.ones(3))
    message = str(raised.value)
    assert "depends on data, which a trace does not have" in message
    assert "test_constants_read.py" in message
    assert not any(word in message for word in ("Guard", "sympy", "TORCH", "scalar_dense"))
