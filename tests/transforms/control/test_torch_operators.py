"""Control flow of programs as torch's own operators: eager, torch.export and inductor agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsfunc
from tsfunc import (
    MetaTensorType,
    associative_scan,
    cond,
    fori_loop,
    grad,
    pytrees,
    scan,
    specialize,
    switch,
    vmap,
    while_loop,
)
from tsfunc.transforms.control import control_operators as operators

X = torch.tensor([0.5, -1.5, 2.0])
W = torch.tensor([0.1, 0.2, 0.3])
ONE = torch.ones(())


def _nested(x: torch.Tensor) -> Any:
    def step(c: Any, r: Any) -> Any:
        return cond(r > 0, lambda: c * r, lambda: c - r), c

    return cond(x.sum() > 0, lambda: scan(step, ONE, x)[1], lambda: x)


def _rows(x: torch.Tensor) -> Any:
    return scan(lambda c, r: (c * r, (c + r, r)), ONE, x, reverse=True)


# The name of torch's operator, and the function.
CASES: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "cond": ("cond", lambda x: cond(x.sum() > 0, lambda: (x.sin(), x), lambda: (x * W, x))),
    "cond-number": ("cond", lambda x: cond(x.sum(), lambda: x.sin(), lambda: x.t())),
    "switch": (
        "cond",
        lambda x: switch((x > 0).sum(), [lambda: x.sin(), lambda: x * 2, lambda: x + W]),
    ),
    "while_loop": (
        "while_loop",
        lambda x: while_loop(lambda c: c[0] < x[2], lambda c: (c[0] + 1, c[1] * W), (0, x)),
    ),
    "fori_loop": ("scan", lambda x: fori_loop(0, 3, lambda i, c: c * x + i, x)),
    "fori_loop-tensor": (
        "while_loop",
        lambda x: fori_loop(0, (x > 0).sum(), lambda i, c: c * x, x),
    ),
    "scan": ("scan", lambda x: scan(lambda c, r: (c * r + W.sum(), (c, r)), ONE, x)),
    "scan-reverse": ("scan", _rows),
    "scan-length": ("scan", lambda x: scan(lambda c, _: (c * W, c.sum()), x, None, length=4)),
    "map": ("map_impl", lambda x: tsfunc.map(lambda r: (r * W, r), x)),
    "associative_scan": ("scan", lambda x: associative_scan(torch.mul, x)),
    "associative_scan-matrices": (
        "scan",
        lambda x: associative_scan(torch.matmul, x.view(3, 1, 1) * torch.eye(2), reverse=True),
    ),
    "nested": ("cond", _nested),
    "vmap-cond": ("cond", lambda x: vmap(lambda y: cond(y > 0, torch.sin, torch.cos, y))(x)),
    "vmap-scan": ("scan", lambda x: vmap(lambda y: scan(lambda c, r: (c * r, c + y), y, x))(x)),
    "vmap-while": (
        "while_loop",
        lambda x: vmap(lambda y: while_loop(lambda c: c < 2, lambda c: c + 1, y))(x),
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize(("name", "f"), CASES.values(), ids=CASES)


def _program(f: Callable[..., Any], *args: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    s = specialize(f)
    expected = pytrees.leaves_of(s(*args))
    return s, s.graph_module, expected


def _names(graph: torch.fx.Graph) -> set[str]:
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return {str(t) for t in targets if isinstance(t, torch._ops.HigherOrderOperator)}


@EACH
def test_a_graph_module_has_torchs_operators(name: str, f: Callable[..., Any]) -> None:
    s, module, _ = _program(f, X)
    assert _names(module.graph) == {name}
    for x in (X, -X):
        torch.testing.assert_close(list(module(x)), pytrees.leaves_of(s(x)))


SOME = ("cond", "while_loop", "scan-reverse", "map")


@pytest.mark.parametrize(
    ("name", "f"),
    [pytest.param(*case, id=key, marks=() if key in SOME else (pytest.mark.slow,))
     for key, case in CASES.items()],
)  # fmt: skip
def test_it_is_exported_as_that(name: str, f: Callable[..., Any]) -> None:
    s, _, expected = _program(f, X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = s.to_exported_program()
    assert _names(exported.graph) == {name}
    torch.testing.assert_close(pytrees.leaves_of(exported.module()(X)), expected)


@pytest.mark.slow
@EACH
def test_inductor_compiles_it(name: str, f: Callable[..., Any]) -> None:
    _, module, expected = _program(f, X)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(module, backend="inductor", fullgraph=True)
        torch.testing.assert_close(list(compiled(X)), expected)


@pytest.mark.slow
@EACH
def test_it_runs_by_inductor(name: str, f: Callable[..., Any]) -> None:
    s = specialize(f, backend="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (X, X * 2):
            torch.testing.assert_close(pytrees.leaves_of(s(x)), _program(f, x)[2])


@pytest.mark.slow
def test_named_sizes_stay_dynamic() -> None:
    s = specialize(_rows, {"x": MetaTensorType(["n"])})
    s(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = s.to_exported_program()
    for x in (X, torch.linspace(0.5, 1.5, 7)):
        torch.testing.assert_close(exported.module()(x), _rows(x))


def test_an_elementwise_associative_scan_is_torchs_where_inductor_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "_PARALLEL", {"cpu"})

    def f(x: torch.Tensor) -> Any:
        return associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x + 1))

    _, module, expected = _program(f, X)
    assert _names(module.graph) == {"associative_scan"}
    torch.testing.assert_close(list(module(X)), expected)
    # A combination that is not elementwise runs sequentially, as a scan.
    _, module, _ = _program(CASES["associative_scan-matrices"][1], X)
    assert _names(module.graph) == {"scan"}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["cond", "fori_loop", "scan-reverse"])
def test_the_module_has_gradients_by_torchs_own_rules(key: str) -> None:
    f = CASES[key][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, module, _ = _program(f, X)
        x = X.clone().requires_grad_()
        found = torch.autograd.grad(module(x)[-1].sum(), x)
        y = X.clone().requires_grad_()
        torch.testing.assert_close(found, torch.autograd.grad(pytrees.leaves_of(f(y))[-1].sum(), y))


class Tripled(torch.autograd.Function):
    """A function whose derivative differs from that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * ct * x


def tripled(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Tripled.apply(x)  # type: ignore[no-untyped-call]
    return found.sum()


def _chosen(x: torch.Tensor) -> Any:
    def quiet(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return (x * y).sum()

    return cond(x.sum() > 0, quiet, lambda x: x.cos().sum(), x)


def _scanned(x: torch.Tensor) -> Any:
    return scan(lambda c, r: (c * r.sin(), c), x.sum(), x)[0]


def _looped(x: torch.Tensor) -> Any:
    return while_loop(lambda x: x.sum() < 10, lambda x: x * (2 + x.sin()), x).sum()


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad of a choice, with a part that is not differentiated": grad(_chosen),
    "grad of a scan": grad(_scanned),
    "vmap(grad) of a scan": lambda x: vmap(grad(_scanned))(x.outer(W)),
    "jvp of a scan": lambda x: tsfunc.jvp(_scanned, (x,), (W.sum() * x,)),
    "grad of a loop": grad(_looped),
    "vmap of a choice": vmap(lambda x: cond(x > 0, torch.sin, torch.cos, x)),
    "grad of an autograd.Function": grad(tripled),
    "vmap(grad) of one": vmap(grad(tripled)),
    "grad of a checkpoint": grad(lambda x: tsfunc.checkpoint(lambda x: x.sin().cos())(x).sum()),
}


QUICK = ("grad of a scan", "grad of an autograd.Function", "grad of a checkpoint")


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, f in DERIVATIVES.items()
    ],
)
def test_derivatives_and_batches_are_written_in_torchs_operators(f: Callable[..., Any]) -> None:
    s = specialize(f, {"x": MetaTensorType(["n"])})
    y = torch.tensor([1.0, 0.5, -2.5, 0.25, 0.0])
    expected = [s(X), s(X.abs())]
    exported = s.to_exported_program().module()
    for x, want in zip((X, X.abs()), expected, strict=True):
        torch.testing.assert_close(exported(x), want)
        torch.testing.assert_close(s.graph_module(x), tuple(pytrees.leaves_of(want)))
    if f is not DERIVATIVES["vmap(grad) of a scan"] and f is not DERIVATIVES["jvp of a scan"]:
        torch.testing.assert_close(exported(y), s(y))


def test_a_backend_takes_derivatives_of_control_flow() -> None:
    f = specialize(grad(_scanned), backend="aot_eager")
    torch.testing.assert_close(f(X), grad(_scanned)(X))


def test_a_function_keeps_its_derivative() -> None:
    """An exported program has the called operators in place of a differentiable function."""
    f = specialize(tripled)
    x = X.clone().requires_grad_()
    f(x)
    torch.autograd.backward(f.graph_module(x))
    torch.testing.assert_close(x.grad, 3 * X)
    torch.testing.assert_close(f.to_exported_program().module()(x), (X * X).sum())


def test_a_tangent_through_a_choice_is_exported() -> None:
    f = specialize(lambda x: tsfunc.jvp(_chosen, (x,), (x,))[1])
    for x in (X, -X):
        expected = tsfunc.jvp(_chosen, (x,), (x,))[1]
        torch.testing.assert_close(f(x), expected)
        torch.testing.assert_close(f.to_exported_program().module()(x), expected)
