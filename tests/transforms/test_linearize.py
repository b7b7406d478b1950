"""linearize: the derivative that jvp gives, with the function run once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tsfunc
from tests.transforms.support import as_torch_func, messages_of_mistakes, same

X = torch.arange(12.0).view(3, 4).sin()
Y = X.cos()
T = X.exp()


def nested(tree: Any) -> Any:
    x, (y, z) = tree["x"], tree["rest"]
    return {"sum": x.sum(), "pair": [y * z, (x @ z.T).tanh()]}


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one": (torch.sin, (X,)),
    "several": (lambda a, b: a * b.exp() + b, (X, Y)),
    "a tuple": (lambda a: (a.cos(), a.sum()), (X,)),
    "containers": (nested, ({"x": X, "rest": (Y, T)},)),
    "unused": (lambda a, b: b * 2, (X, Y)),
    "a constant": (lambda a: (a * 2, Y), (X,)),
    "views written to": (lambda a: a.clone().T.mul_(2)[1:].sin_(), (X,)),
    "complex": (lambda z: z.exp() * z, (torch.complex(X, Y),)),
}


def directions(primals: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: (x * 3).cos(), primals)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_jvp(name: str) -> None:
    func, primals = FUNCTIONS[name]
    tangents = directions(primals)
    out, push = tsfunc.linearize(func, *primals)
    same((out, push(*tangents)), torch.func.jvp(func, primals, tangents))
    same(push(*tangents), push(*tangents))


# torch.func's linearize traces the function, and warns about its trace.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("name", ["one", "several", "a tuple"])
def test_as_torch_func(name: str) -> None:
    func, primals = FUNCTIONS[name]
    as_torch_func(lambda T: T.linearize(func, *primals)[1](*directions(primals)))


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(0, 3), max_size=3), a=st.floats(-2, 2), b=st.floats(-2, 2))
def test_it_is_linear(shape: list[int], a: float, b: float) -> None:
    x, s, t = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    _, push = tsfunc.linearize(lambda x: (x.sin() * x.sum(), x.exp()), x)
    for both, one, other in zip(push(a * s + b * t), push(s), push(t), strict=True):
        torch.testing.assert_close(both, a * one + b * other)


def test_the_function_runs_once() -> None:
    runs = []

    def func(x: Tensor) -> Tensor:
        runs.append(x)
        return x.sin()

    _, push = tsfunc.linearize(func, X)
    tsfunc.vmap(push)(torch.stack([Y, T]))
    push(Y)
    assert len(runs) == 1


def test_with_the_other_transforms() -> None:
    basis = torch.eye(4)

    def jacobian(x: Tensor) -> Tensor:
        return tsfunc.vmap(tsfunc.linearize(lambda x: x.sin() * x.sum(), x)[1], out_dims=1)(basis)

    want = torch.func.jacfwd(lambda x: x.sin() * x.sum())
    same(jacobian(X[0]), want(X[0]))
    same(tsfunc.vmap(jacobian)(X), torch.func.vmap(want)(X))
    same(
        tsfunc.grad(lambda x: jacobian(x).square().sum())(X[0]),
        torch.func.grad(lambda x: want(x).square().sum())(X[0]),
    )
    same(
        tsfunc.jvp(jacobian, (X[0],), (Y[0],)),
        torch.func.jvp(want, (X[0],), (Y[0],)),
    )


def test_outputs_without_a_derivative() -> None:
    out, push = tsfunc.linearize(lambda x: (x * 2, x.argmax(1), x > 0), X)
    same(out, (X * 2, X.argmax(1), X > 0))
    same(push(Y), (Y * 2, torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.bool)))


MESSAGES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: tsfunc.linearize(torch.sin, 1.0),
        ValueError,
        "linearize(f, *primals): Expected primals to only contain Tensors.",
    ),
    (
        lambda: tsfunc.linearize(lambda x: 3, X),
        RuntimeError,
        "expected f(*primals) to return only tensors, got unsupported type <class 'int'>",
    ),
    (
        lambda: tsfunc.linearize(torch.sin, X)[1]((Y, Y)),  # type: ignore[arg-type]
        RuntimeError,
        "jvp_fn(*tangents): Expected the tangents to have the same argspec as the primals",
    ),
    (
        lambda: tsfunc.linearize(torch.sin, X)[1](1.0),  # type: ignore[arg-type]
        RuntimeError,
        "jvp_fn(*tangents): Expected Tensors, got <class 'float'>",
    ),
    (
        lambda: tsfunc.linearize(torch.sin, X)[1](Y[None]),
        RuntimeError,
        "the tangent at position 0 in flattened pytree doesn't match the shape of its primal: "
        "expected (3, 4), got (1, 3, 4).",
    ),
    (
        lambda: tsfunc.linearize(torch.sin, X)[1](Y.double()),
        RuntimeError,
        "in flattened pytree doesn't match the dtype of its primal: expected torch.float32, got "
        "torch.float64",
    ),
    (
        lambda: tsfunc.linearize(torch.sin, X)[1](Y.to("meta")),
        RuntimeError,
        "in flattened pytree doesn't match the device of its primal: expected cpu, got meta",
    ),
]


test_mistakes_in_calls_of_linearize_have_messages = messages_of_mistakes(MESSAGES)


def test_results_have_a_graph_only_where_somebody_outside_differentiates() -> None:
    x, t = torch.linspace(0, 1, 3), torch.ones(3)
    out, push = tsfunc.linearize(torch.sin, x)
    assert not out.requires_grad
    assert not push(t).requires_grad
    assert push(t.clone().requires_grad_()).requires_grad
    weight = torch.tensor(2.0, requires_grad=True)
    out, push = tsfunc.linearize(lambda x: weight * x.sin(), x)
    assert out.requires_grad
    torch.testing.assert_close(torch.autograd.grad(push(t).sum(), weight)[0], x.cos().sum())
    x.requires_grad_()
    _, push = tsfunc.linearize(torch.sin, x)
    torch.testing.assert_close(torch.autograd.grad(push(t).sum(), x)[0], -x.sin())


@pytest.mark.parametrize("run", [lambda f: f, tsfunc.vmap, tsfunc.specialize])
def test_an_auxiliary_part_is_passed_through(run: Any) -> None:
    def f(x: Tensor) -> Any:
        out, push, aux = tsfunc.linearize(lambda x: (x.sin(), {"x": x}), x, has_aux=True)
        return out, push(torch.ones_like(x)), aux["x"]

    for found, expected in zip(run(f)(Y), (Y.sin(), Y.cos(), Y), strict=True):
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own linearize warns about its graph
        same(torch.func.functionalize(f)(Y)[2], Y)


def test_a_function_without_an_auxiliary_part_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^linearize.*should be a tuple: \(output, aux\)"):
        tsfunc.linearize(torch.sin, X, has_aux=True)


def test_tangents_require_grad_if_the_function_depends_on_other_leaves() -> None:
    weight = Y.clone().requires_grad_()
    for f, expected in ((torch.sin, False), (lambda x: x.sin() * weight, True)):
        _, push = tsfunc.linearize(f, X)
        assert push(T).requires_grad is expected
        assert tsfunc.vmap(push)(torch.stack([T, Y])).requires_grad is expected
        if expected:
            assert tsfunc.jvp(push, (T,), (T,))[1].requires_grad
        assert tsfunc.specialize(push)(T).requires_grad is expected


def test_a_traced_function_uses_recorded_derivatives_of_a_batch() -> None:
    def product(x: Tensor, v: Tensor) -> Any:
        _, push = tsfunc.linearize(torch.sin, x)
        _, pull = tsfunc.vjp(torch.sin, x)
        return tsfunc.specialize(lambda v: pull(push(v))[0])(v)

    same(tsfunc.vmap(product)(X, T), X.cos() ** 2 * T)
    same(tsfunc.vmap(tsfunc.vmap(product))(X, T), X.cos() ** 2 * T)
    same(tsfunc.specialize(tsfunc.vmap(product))(X, T), X.cos() ** 2 * T)


@pytest.mark.parametrize("derivative", ["vjp", "linearize"])
def test_a_rule_of_a_program_can_not_use_derivatives_recorded_in_the_trace(derivative: str) -> None:
    def f(x: Tensor, v: Tensor) -> Any:
        _, recorded = getattr(tsfunc, derivative)(torch.sin, x)
        rule = tsfunc.custom_vjp(lambda v: tsfunc.pytrees.leaves_of(recorded(v))[0])
        rule.defvjp(lambda v: (rule(v), None), lambda _, ct: (ct,))
        return rule(v)

    same(f(X, T), X.cos() * T)
    with pytest.raises(tsfunc.errors.EscapedTracerError, match="call vjp or linearize inside"):
        tsfunc.specialize(f)(X, T)


def transposed(push: Callable[..., Any], v: Tensor) -> Any:
    return tsfunc.vmap(lambda e: tsfunc.vjp(push, v)[1](e)[0])(torch.eye(v.numel()))


MATRICES: dict[str, Callable[..., Any]] = {
    "itself": lambda push, v: push(v),
    "jvp": lambda push, v: tsfunc.jvp(push, (v,), (v,))[1],
    "vjp": lambda push, v: tsfunc.vjp(push, v)[1](v)[0],
    "vmap": lambda push, v: tsfunc.vmap(push)(torch.eye(v.numel())) @ v,
    "jacfwd": lambda push, v: tsfunc.jacfwd(push)(v) @ v,
    "jacrev": lambda push, v: tsfunc.jacrev(push)(v) @ v,
    "vmap(vjp)": lambda push, v: transposed(push, v) @ v,
}


@pytest.mark.parametrize("use", MATRICES)
@pytest.mark.parametrize("derivative", ["vjp", "linearize"])
def test_recorded_derivatives_inside_of_a_jvp(derivative: str, use: str) -> None:
    """The saved values of a pullback carry tangents of the outer jvp alone."""

    def f(x: Tensor, v: Tensor) -> Any:
        _, recorded = getattr(tsfunc, derivative)(torch.sin, x)
        return MATRICES[use](lambda v: tsfunc.pytrees.leaves_of(recorded(v))[0], v)

    def pushed(x: Tensor, v: Tensor, t: Tensor) -> Any:
        return tsfunc.jvp(lambda x: f(x, v), (x,), (t,))[1]

    want = -X.sin() * Y * T
    same(tsfunc.specialize(pushed)(X[1], T[1], Y[1]).detach(), want[1])
    same(torch.stack([pushed(*row) for row in zip(X, T, Y, strict=True)]).detach(), want)
    same(tsfunc.vmap(pushed)(X, T, Y).detach(), want)
    same(tsfunc.jvp(tsfunc.vmap(f), (X, T), (Y, torch.zeros_like(T)))[1].detach(), want)
