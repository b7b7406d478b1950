"""An exported program is valid for all sizes that its descriptors allow, whatever torch guards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from tests.program.test_exporting import WAYS
from tsfunc import Dim, associative_scan, cond, specialize
from tsfunc import MetaTensorType as Meta

Function = Callable[..., Any]


def _served(f: Function, descriptors: Any, first: Any, others: Any, way: str = "module") -> None:
    """Check the exported program of a call at other sizes."""
    g = specialize(f, descriptors)
    g(*first)
    module = WAYS[way](g.to_exported_program()).module()
    for args in others:
        torch.testing.assert_close(module(*args), f(*args))


def _stacked(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1, x * 2]).reshape(-1, 3, 32)


QUESTIONS: dict[str, Function] = {
    "rows of a stack": _stacked,
    "a transposed matrix": lambda x: x.t().reshape(-1, 4),
    "columns": lambda x: x.t().flatten(),
    "heads": lambda x: x.view(-1, 4, 8).transpose(0, 1).reshape(-1, 8),
    "an expanded dim": lambda x: x[:, None].expand(-1, 3, -1).reshape(-1, 32),
    "a contiguous copy": lambda x: x.t().contiguous().view(-1),
    "a broadcast sum": lambda x: (x[:, None] + x[None]).sum(1),
    "a slice that may be all": lambda x: x[:5],
    "a slice from the end": lambda x: x[-3:],
    "a half": lambda x: x[x.shape[0] // 2 :],
}


@pytest.mark.parametrize("n", [3, 6])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_size_may_equal_another_one_by_chance(name: str, n: int) -> None:
    """Guards that torch does not need restrict nothing: NOTE [guards of torch.export]."""
    sizes = (2, 3, 4, 5, 9)
    others = [(torch.randn(size, 32),) for size in sizes]
    _served(QUESTIONS[name], {"x": Meta(["n", 32])}, (torch.randn(n, 32),), others)


DECOMPOSED: dict[str, Function] = {
    "every second row": lambda x: x[1:-1:2],
    "a half": lambda x: x[: x.shape[0] // 2].sum(0),
    "as many of the largest": lambda x: x.topk(x.shape[0] // 2, 0).values,
    "parts": lambda x: x.split([2, x.shape[0] - 2]),
    "products": lambda x: associative_scan(torch.mul, x),
    "a convolution": lambda x: conv1d(x.t()[None], torch.ones(2, 32, 3), stride=2, padding=1),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", DECOMPOSED)
def test_decompositions_ask_no_more(name: str) -> None:
    others = [(torch.randn(size, 32),) for size in (3, 4, 9, 24)]
    first = (torch.randn(5, 32),)
    _served(DECOMPOSED[name], {"x": Meta([Dim("n", min=3), 32])}, first, others, "decompositions")


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_decomposed_twice() -> None:
    g = specialize(lambda x: x[1:-1:2].exp(), {"x": Meta(["n"])})
    g(torch.ones(7))
    module = g.to_exported_program().run_decompositions({}).run_decompositions().module()
    for n in (2, 3, 5):
        torch.testing.assert_close(module(torch.ones(n)), torch.ones(n)[1:-1:2].exp())


def test_the_least_multiple() -> None:
    others = [(torch.randn(n),) for n in (2, 6, 12)]
    g = {"x": Meta([Dim("n", multiple_of=2)])}
    _served(lambda x: x.view(-1, 2).sum(1), g, (torch.randn(8),), others)


# --- recurrent layers, which torch unrolls


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "tanh": lambda: nn.RNN(3, 4, bias=False),
    "GRU": lambda: nn.GRU(3, 4),
    "LSTM": lambda: nn.LSTM(3, 4, bidirectional=True),
    "projections": lambda: nn.LSTM(3, 4, 2, proj_size=2, bias=False, dropout=0.5).eval(),
}


def _sequences(batch_first: bool, *sizes: tuple[int, int]) -> list[tuple[Tensor]]:
    return [(torch.randn((b, t, 3) if batch_first else (t, b, 3)),) for t, b in sizes]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_take_other_lengths(name: str) -> None:
    net = LAYERS[name]().requires_grad_(False)
    first, *others = _sequences(False, (5, 2), (7, 3), (2, 4))
    ways = WAYS if name == "LSTM" else ["module"]
    for way in ways:
        _served(net, {"input": Meta(["t", "b", 3])}, first, others, way)


def test_recurrent_layers_with_states_and_batches_first() -> None:
    net = nn.GRU(3, 4, batch_first=True).requires_grad_(False)
    first, *others = [
        (*_sequences(True, (t, b))[0], torch.randn(1, b, 4)) for t, b in ((5, 2), (2, 3), (6, 2))
    ]
    descriptors = {"input": Meta(["b", "t", 3]), "hx": Meta([1, "b", 4])}
    _served(net, descriptors, first, others)


def test_a_recurrent_layer_in_a_branch() -> None:
    net = nn.GRU(3, 4).requires_grad_(False)

    def f(x: Tensor) -> Any:
        return cond(
            x.sum() > 0, lambda: net(x)[0], lambda: net(-x)[1] + x.new_zeros(x.shape[0], 2, 4)
        )

    first, *others = _sequences(False, (5, 2), (7, 2), (2, 2))
    _served(f, {"x": Meta([Dim("t", max=99), 2, 3])}, first, [*others, (-others[0][0].abs(),)])


# torch's derivative of a scan loads its compiler, which uses deprecated parts of torch.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.slow
def test_derivatives_of_recurrent_layers() -> None:
    net = nn.LSTM(3, 4, num_layers=2)
    g = specialize(net, {"input": Meta(["t", 2, 3])})
    (first,), (x,) = _sequences(False, (5, 2), (7, 2))
    g(first)
    module, eager = g.to_exported_program().module(), copy.deepcopy(net)
    for each in (module, eager):
        each(x)[0].sin().sum().backward()
    got = {name: p.grad for name, p in module.named_parameters()}
    want = {name: p.grad for name, p in eager.named_parameters()}
    torch.testing.assert_close(got, want)
