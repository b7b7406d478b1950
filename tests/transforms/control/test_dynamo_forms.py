"""Our control flow in functions that torch.compile, torch.export and make_fx record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tsfunc
from tests.transforms.support import leaves
from tsfunc import associative_scan, cond, fori_loop, scan, switch, while_loop

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs gcc"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch's compiler
]

LAYER = torch.nn.Linear(3, 3)
X = torch.tensor([0.3, -0.5, 0.7])
ROWS = torch.tensor([[0.1, 0.2, 0.3], [1.0, -1.0, 0.5]])
TRUE = torch.tensor(True)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "cond": (
        lambda p, x: cond(p, lambda y: LAYER(y) * x, lambda y: y, (x,)), (TRUE, X), "cond"
    ),
    "cond-jax": (
        lambda p, x: cond(p, lambda d, n: {"y": d["x"] * n}, lambda d, n: {"y": d["x"]},
                          {"x": x, "none": None}, 3),
        (TRUE, X), "cond",
    ),
    "switch": (
        lambda i, x: switch(i, [torch.sin, torch.cos, torch.tanh], x), (torch.tensor(7), X), "cond"
    ),
    "while": (
        lambda x: while_loop(lambda c: c["i"] < 3, lambda c: {"i": c["i"] + 1, "x": LAYER(c["x"])},
                             {"i": 0, "x": x}),
        (X,), "while_loop",
    ),
    "while-torch": (
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()),
                             (torch.tensor(0), x)),
        (X,), "while_loop",
    ),
    "fori": (
        lambda n, x: fori_loop(0, n, lambda i, c: c * x + i, x), (torch.tensor(3), X), "while_loop"
    ),
    "scan": (
        lambda c, rows: scan(lambda c, r: (c * r, c), c, rows, reverse=True), (X, ROWS), "scan"
    ),
    "scan-length": (lambda c: scan(lambda c, _: (c * 2, c), c, length=3), (X,), "scan"),
    "map": (lambda rows, x: tsfunc.map(lambda r: r * x, rows, batch_size=2), (ROWS, X), "map_impl"),
    "associative-scan": (lambda rows: associative_scan(torch.mul, rows, axis=1), (ROWS,), ""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(got: Any, want: Any) -> None:
    for g, w in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(torch.as_tensor(g), torch.as_tensor(w))


def operators(module: torch.fx.GraphModule) -> str:
    """Return the names of all operators of a graph and of its inner graphs."""
    graphs = [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
    return " ".join(str(node.target) for graph in graphs for node in graph.nodes)


@pytest.mark.parametrize("name", CASES)
def test_torch_compile_makes_one_graph_with_torchs_operator(name: str) -> None:
    f, args, operator = CASES[name]
    args = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in args)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    found, expected = torch.compile(f, backend=backend, fullgraph=True)(*args), f(*args)
    assert_same(found, expected)
    assert len(graphs) == 1 and operator in operators(graphs[0])
    by = [x for x in args if x.requires_grad]
    slopes = [
        torch.autograd.grad(sum(y.sum() for y in leaves(tree) if y.is_floating_point()), by)
        for tree in (found, {key: value for key, value in enumerate(leaves(expected))
                             if isinstance(value, torch.Tensor)})
    ]  # fmt: skip
    assert_same(*slopes)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", ["cond-jax", "switch", "while-torch", "map", "associative-scan"])
def test_make_fx_records_torchs_operator(name: str, mode: Any) -> None:
    f, args, operator = CASES[name]
    graph = make_fx(f, tracing_mode=mode)(*args)
    assert_same(graph(*args), f(*args))
    assert operator in operators(graph)
    if name == "cond-jax":
        other = torch.tensor(False), X
        assert_same(graph(*other), f(*other))


@pytest.mark.parametrize("strict", [False, True], ids=["export", "strict"])
@pytest.mark.parametrize("name", ["cond", "while", "scan"])
def test_torch_export_records_torchs_operator(name: str, strict: bool) -> None:
    f, args, operator = CASES[name]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYER

        def forward(self, *args: Any) -> Any:
            return f(*args)

    exported = torch.export.export(Model(), args, strict=strict)
    assert operator in operators(exported.graph_module)
    assert_same(exported.module()(*args), f(*args))


def test_a_known_choice_is_pythons_in_a_graph_too() -> None:
    def f(x: torch.Tensor) -> Any:
        chosen = cond(x.shape[0] == 3, torch.sin, torch.cos, x)
        return fori_loop(2, 2, lambda i, c: c * 2, switch(-1, [torch.tanh, torch.exp], chosen))

    graph = make_fx(f)(X)
    assert "higher_order" not in operators(graph) and "cond" not in operators(graph)
    assert_same(graph(X), f(X))
