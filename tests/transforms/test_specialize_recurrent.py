"""Derivatives of recurrent layers in programs: one program for all batch sizes and lengths."""

from __future__ import annotations

import operator
import random
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tsfunc
from tsfunc import MetaTensorType, grad, jvp, specialize, vmap
from tsfunc.pytrees import leaves_of

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_relu": nn.RNNCell,
}  # fmt: skip
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": grad,
    "vmap(grad)": lambda f: vmap(grad(f)),
    "vmap(grad), in_dims 1": lambda f: vmap(grad(f), in_dims=1),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jvp(grad)": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),)),
}

SLOW = ("vmap(grad)", "jvp(grad)")


def drawn_layer(name: str, draw: random.Random, projects: bool = True) -> nn.RNNBase:
    options: dict[str, Any] = {
        "num_layers": draw.choice([1, 2]),
        "bias": draw.random() < 0.5,
        "bidirectional": draw.random() < 0.5,
        "batch_first": draw.random() < 0.5,
    }
    if name == "lstm" and projects and draw.random() < 0.5:
        options["proj_size"] = 2
    if name == "rnn":
        options["nonlinearity"] = draw.choice(["tanh", "relu"])
    return LAYERS[name](3, 4, **options).double()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "transform",
    [pytest.param(t, marks=pytest.mark.slow) if t in SLOW else t for t in TRANSFORMS],
)
@pytest.mark.parametrize("name", LAYERS)
def test_one_program_for_open_batch_and_length(name: str, transform: str) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layer = drawn_layer(name, draw)

    def loss(x: Tensor) -> Tensor:
        out, state = layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return out.sin().sum() + sum(each.cos().sum() for each in states)

    f = TRANSFORMS[transform](loss)
    program = specialize(f, {"x": MetaTensorType(["a", "b", 3])})
    for a, b in ((3, 5), (draw.randint(2, 6), draw.randint(2, 6)), (4, 2)):
        x = torch.randn(a, b, 3, dtype=torch.float64)
        torch.testing.assert_close(program(x), f(x))
    assert program.cache_info().programs == 1


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("descriptors", [{}, {"x": MetaTensorType(["a", "b", 3])}])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_strides_of_results(name: str, batch_first: bool, descriptors: dict[str, Any]) -> None:
    projected = {"proj_size": 2} if name == "lstm" else {}
    for options in ({}, {"bidirectional": True}, {"num_layers": 2, **projected}):
        layer = LAYERS[name](3, 4, batch_first=batch_first, **options)
        program = specialize(lambda x, layer=layer: leaves_of(layer(x)), descriptors)
        with torch.no_grad():
            for x in (torch.randn(2, 5, 3), torch.randn(1, 1, 3)):
                for got, want in zip(program(x), leaves_of(layer(x)), strict=True):
                    torch.testing.assert_close(got, want)
                    assert got.stride() == want.stride()


@pytest.mark.parametrize("name", LAYERS)
def test_the_time_of_a_trace_does_not_grow_with_the_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length of one is traced as a large one, so that saving a layer took many minutes."""
    dispatch, calls = FakeTensorMode.dispatch, []

    def counted(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(func)
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    layer, counts = LAYERS[name](3, 4), []
    for length in (3, 30):
        calls.clear()
        with torch.no_grad():
            specialize(layer, {"input": MetaTensorType(["t", "b", 3])})(torch.ones(length, 2, 3))
        counts.append(len(calls))
    assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_derivatives_for_one_shape(name: str, dtype: torch.dtype) -> None:
    """In single precision oneDNN has a kernel of its own for an LSTM, with a workspace."""
    seed = secrets.randbits(32)
    print("seed", seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layer = drawn_layer(name, draw, projects=dtype is torch.float64).to(dtype)
    weights = list(layer.parameters())

    def loss(x: Tensor) -> Tensor:
        return layer(x)[0].square().sum()

    def by_autograd(x: Tensor) -> Any:
        return torch.autograd.grad(loss(x), weights)

    x = torch.randn(2, draw.randint(1, 4), draw.randint(1, 4), 3, dtype=dtype)
    for f, given in ((by_autograd, x[0]), (grad(loss), x[0]), (vmap(grad(loss)), x)):
        torch.testing.assert_close(specialize(f)(given), f(given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(specialize(loss)(x[0]), loss(x[0]))


@pytest.mark.parametrize("name", LAYERS)
def test_functional_calls_of_layers(name: str) -> None:
    """The module's own list of weights is as it was, so that later calls use its parameters."""
    layer = LAYERS[name](3, 4, bidirectional=True).double()
    weights = list(layer._flat_weights)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    gradients = vmap(grad(loss), in_dims=(None, 0))
    program = specialize(gradients)
    for scale in (1.0, 0.5):
        given = {key: scale * value.detach() for key, value in layer.named_parameters()}
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        got = program(given, x)
        assert len(layer._flat_weights) == len(weights)
        assert all(map(operator.is_, layer._flat_weights, weights))
        torch.testing.assert_close(got, gradients(given, x))
        layer._init_flat_weights()  # an eager functional call leaves the call's tensors in the list
        weights = list(layer._flat_weights)
    assert program.cache_info().programs == 1


@pytest.mark.parametrize("name", CELLS)
def test_cells_over_an_open_batch(name: str) -> None:
    options = {"nonlinearity": "relu"} if name == "rnn_relu" else {}
    cell = CELLS[name](3, 4, **options).double()
    own = dict(cell.named_parameters())

    def loss(parameters: dict[str, Any], x: Tensor) -> Tensor:
        state = torch.func.functional_call(cell, parameters, (x,))
        out = state[0] * state[1] if isinstance(state, tuple) else state
        return out.sin().sum()

    f = grad(loss, argnums=(0, 1))
    program = specialize(f, {"x": MetaTensorType(["n", 3])})
    for n in (3, 6):
        x = torch.randn(n, 3, dtype=torch.float64)
        torch.testing.assert_close(program(own, x), f(own, x))
    assert program.cache_info().programs == 1


def test_dropout_between_layers_is_drawn_as_outside_of_a_program() -> None:
    layer = nn.GRU(3, 4, num_layers=3, dropout=0.5).double()
    f = grad(lambda x: layer(x)[0].sin().sum())
    program = tsfunc.specialize(f, {"x": MetaTensorType(["n", "b", 3])})
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    for _ in range(2):
        torch.manual_seed(7)
        expected = f(x)
        torch.manual_seed(7)
        torch.testing.assert_close(program(x), expected)
