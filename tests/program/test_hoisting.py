"""Hoisting: work on parameters runs once, and every call returns what the function returns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from tsfunc import MetaTensorType as Meta
from tsfunc import cond, grad, jvp, specialize, vmap
from tsfunc.program.graphs.hoisting import Hoisted


def parts(f: Any) -> tuple[list[str], list[str]]:
    """Return the operators that the program calls once, and those that it calls in every call."""
    run = f.program.run
    assert isinstance(run, Hoisted)
    graphs = [f.program.graph] if run._parts is None else [part.graph for part in run._parts[:2]]
    first, rest = ([], *map(_calls, graphs)) if run._parts is None else map(_calls, graphs)
    return first, rest


def _calls(graph: torch.fx.Graph) -> list[str]:
    return [
        getattr(node.target, "__name__", "").partition(".")[0]
        for node in graph.nodes
        if node.op == "call_function"
    ]


def normed() -> nn.Module:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(linear, nn.ReLU(inplace=True), nn.Linear(4, 2)).eval()


# Functions of weights and an input, with the operators that can be hoisted.
FUNCTIONS: list[tuple[Callable[[Tensor, Tensor], Any], set[str]]] = [
    (lambda w, x: x @ torch.linalg.inv(w), {"linalg_inv"}),
    (lambda w, x: F.linear(x, w.tanh().mT), {"tanh", "transpose"}),
    (lambda w, x: (x * w.exp().sum(0)).relu_(), {"exp", "sum"}),
    (lambda w, x: x @ torch.linalg.svd(w)[0], {"linalg_svd", "getitem"}),
    (lambda w, x: x.add(w.cos()) + torch.arange(4.0), {"cos"}),  # the range is a constant
    (lambda w, x: (x.sin(), w.sin()), set()),  # the caller gets w.sin()
    (lambda w, x: (x.sin(), w.sin().reshape(16)), set()),  # a view of the caller's tensor
    (lambda w, x: w.sin().add_(x), set()),  # it is written to
    (lambda w, x: w.sin().reshape(16).add_(x.sum()), set()),
    (lambda w, x: x + w.t() + w[0], set()),  # views
    (lambda w, x: x + torch.rand(4) * 0 + w.sin(), {"sin"}),
    (lambda w, x: cond(x.sum() > 0, lambda x: x + w.sin(), lambda x: x - w.sin(), x), set()),
]


@pytest.mark.parametrize("backend", ["python", "aot_eager"])
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
@pytest.mark.parametrize("captured", [False, True])
def test_it_does_what_the_function_does(number: int, captured: bool, backend: str) -> None:
    func, hoisted = FUNCTIONS[number]
    w = torch.randn(4, 4) + 4 * torch.eye(4)
    f: Any
    if captured:
        f = specialize(lambda x: func(w, x), hoist=True, backend=backend)
        call: Callable[[Tensor], Any] = f
    else:
        f = specialize(func, hoist="w", backend=backend)
        call = lambda x: f(w, x)  # noqa: E731
    for step in range(3):
        x = torch.randn(4, 4)
        for _ in range(2):
            torch.testing.assert_close(call(x), func(w, x))
        w.mul_(1 + 0.1 * step)
    assert set(parts(f)[0]) == hoisted
    assert not hoisted - {"getitem", "sin"} & set(parts(f)[1])


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda m: None,
    "a write": lambda m: m[2].weight.detach().mul_(2),  # type: ignore[index]
    "a write into a view": lambda m: next(m.parameters())[0].detach().add_(1),
    "a new parameter": lambda m: m[2].register_parameter(  # type: ignore[index]
        "weight", nn.Parameter(torch.randn(2, 4))
    ),
    "other data": lambda m: _set_data(m),
    "a state dict": lambda m: m.load_state_dict(copy.deepcopy(normed()).state_dict()),
    "a step of an optimizer": lambda m: _step(m),
}


def _set_data(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = torch.randn_like(p)


def _step(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    with torch.enable_grad():
        module(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@settings(max_examples=20, deadline=None)
@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=6), seed=st.integers(0, 2**20))
def test_changes_of_parameters_are_seen(changes: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    module = normed()
    f = specialize(module, hoist=True)
    with torch.no_grad():
        for change in ["nothing", *changes]:
            CHANGES[change](module)
            x = torch.randn(3, 4)
            torch.testing.assert_close(f(x), copy.deepcopy(module)(x))
        assert "_weight_norm" in " ".join(parts(f)[0])


def test_other_arguments_are_seen() -> None:
    f = specialize(lambda w, x: x * w["a"].exp(), {"x": Meta(["n", 4])}, hoist=["w"])
    weights = [{"a": torch.randn(4)} for _ in range(3)]
    same_memory = {"a": weights[0]["a"].data}  # its writes are counted separately
    for i in range(12):
        w = [*weights, same_memory][i % 4]
        x = torch.randn(2 + i % 3, 4)
        torch.testing.assert_close(f(w, x), x * w["a"].exp())
    weights[0]["a"].add_(1)
    for w in (same_memory, weights[0]):
        w["a"].add_(1)
        torch.testing.assert_close(f(w, x), x * w["a"].exp())
    assert parts(f)[0] == ["exp"]


def test_the_work_is_done_once() -> None:
    w = torch.randn(4)
    f = specialize(lambda x: x * w.exp(), hoist=True)
    x = torch.randn(4)
    f(x)
    run: Any = f.program.run
    stored = run._stored
    f(torch.randn(4))
    assert run._stored is stored
    w.add_(1)
    f(x)
    assert run._stored is not stored


def test_gradients_reach_parameters() -> None:
    module, x = normed(), torch.randn(3, 4)
    f = specialize(module, hoist=True)
    for _ in range(2):
        expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
        got = torch.autograd.grad(f(x).sum(), list(module.parameters()))
        torch.testing.assert_close(got, expected)
        with torch.no_grad():
            torch.testing.assert_close(f(x), module(x))
    for p in module.parameters():
        p.requires_grad_(False)
    x.requires_grad_()
    (expected_of_x,) = torch.autograd.grad(module(x).sum(), x)
    (of_x,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(of_x, expected_of_x)
    assert isinstance(f.program.run, Hoisted) and f.program.run._stored is not None


def test_it_composes() -> None:
    w = torch.randn(4)

    def plain(x: Tensor) -> Tensor:
        return (x * w.exp()).sin()

    f = specialize(plain, hoist=True)
    xs = torch.randn(3, 4)
    f(xs[0])
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(xs), vmap(plain)(xs))
        torch.testing.assert_close(
            grad(lambda x: f(x).sum())(xs), grad(lambda x: plain(x).sum())(xs)
        )
        torch.testing.assert_close(jvp(f, (xs,), (xs,)), jvp(plain, (xs,), (xs,)))
        torch.testing.assert_close(torch.func.vmap(f)(xs), vmap(plain)(xs))
        outer = specialize(lambda x: f(x) + 1)
        torch.testing.assert_close(outer(xs), plain(xs) + 1)
        w.add_(1)
        torch.testing.assert_close(outer(xs), plain(xs) + 1)


def test_inference_tensors_have_no_counts() -> None:
    with torch.inference_mode():
        w = torch.randn(4)
        f = specialize(lambda x: x * w.exp(), hoist=True)
        for _ in range(3):
            x = torch.randn(4)
            torch.testing.assert_close(f(x), x * w.exp())
            w.add_(1)


def test_a_write_in_the_function_comes_before_the_work() -> None:
    w = torch.randn(4)

    def func(x: Tensor) -> Tensor:
        before = w.exp() * x
        w.add_(1)
        return before + w.cos()

    other = w.clone()
    f = specialize(func, hoist=True)
    for _ in range(3):
        x = torch.randn(4)
        expected = other.exp() * x
        other.add_(1)
        torch.testing.assert_close(f(x), expected + other.cos())
    assert parts(f)[0] == ["exp"]


def test_batch_norm_in_training() -> None:
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4)
    )
    reference = copy.deepcopy(module)
    f = specialize(module, hoist=True)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 4)
            torch.testing.assert_close(f(x), reference(x))
    torch.testing.assert_close(module.state_dict(), reference.state_dict())


def _scaled(w: Tensor, x: Tensor) -> Tensor:
    return x * w.exp()


def test_copies_keep_the_option() -> None:
    f = specialize(_scaled, hoist=("w",))
    again = pickle.loads(pickle.dumps(f))
    w, x = torch.randn(4), torch.randn(4)
    for each in (again, copy.deepcopy(f)):
        torch.testing.assert_close(each(w, x), _scaled(w, x))
        assert parts(each)[0] == ["exp"]


@pytest.mark.parametrize("hoist", ["y", ["w", "y"], 3])
def test_names_of_parameters_are_checked(hoist: Any) -> None:
    with pytest.raises(ValueError, match=r"specialize\(_scaled\): hoist= expected True, False or"):
        specialize(_scaled, hoist=hoist)
