"""grad, grad_and_value, value_and_grad and vjp agree with torch.func's; their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tsfunc
from tests.transforms.support import Api, as_torch_func, messages_of_mistakes, same

X = torch.arange(12.0).view(3, 4).sin()
Y = X.cos()
W = torch.arange(4.0).cos()
S = torch.tensor(0.7)


def anything(value: Any) -> Any:
    """Hide an intentional mistake from the type checker."""
    return value


def scalar(x: Tensor) -> Tensor:
    return (x.sin() ** 2).sum()


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x.sin() * y**2).sum()


def changed_in_place(x: Tensor) -> Tensor:
    z = torch.zeros(4)
    z.add_(x * x)
    z[1:3] *= 2
    return z.sum()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda g: g * 2)
    return (x * x).sum()


CALLS: dict[str, Callable[[Api], Any]] = {
    "grad": lambda T: T.grad(scalar)(W),
    "argnums": lambda T: T.grad(product, argnums=1)(X, Y),
    "argnums from the end": lambda T: T.grad(product, argnums=-1)(X, Y),
    "argnums, a tuple of one": lambda T: T.grad(product, argnums=(0,))(X, Y),
    "argnums, a tuple": lambda T: T.grad(product, argnums=(1, 0))(X, Y),
    "argnums, a tuple from the end": lambda T: T.grad(product, argnums=(0, -1))(X, Y),
    "has_aux": lambda T: T.grad(lambda x: (scalar(x), {"a": x, "b": [x * 2]}), has_aux=True)(W),
    "kwargs": lambda T: T.grad(product)(X, y=Y),
    "a dict": lambda T: T.grad(lambda d: d["a"].sum() * d["b"][0].sum())({"a": X, "b": [Y, W]}),
    "a complex input": lambda T: T.grad(lambda x: (x * x.conj()).real.sum())(torch.complex(W, W)),
    "independent of the input": lambda T: T.grad(lambda x: torch.ones(()))(W),
    "in place, inside": lambda T: T.grad(changed_in_place)(W),
    "a hook": lambda T: T.grad(hooked)(W),
    "a hook under vmap": lambda T: T.vmap(T.grad(hooked))(X),
    "grad_and_value": lambda T: T.grad_and_value(scalar)(W),
    "grad_and_value, argnums": lambda T: T.grad_and_value(product, argnums=(0, 1))(X, Y),
    "grad_and_value, has_aux": lambda T: T.grad_and_value(
        lambda x: (scalar(x), (x, x + 1)), has_aux=True
    )(W),
    "vjp": lambda T: (lambda out, pull: (out, pull(X)))(*T.vjp(torch.sin, X)),
    "vjp, pulled twice": lambda T: (lambda out, pull: (pull(X), pull(Y)))(*T.vjp(torch.sin, X)),
    "vjp, a tuple": lambda T: T.vjp(lambda x: (x.sin(), x.cos()), X)[1]((X, Y)),
    "vjp, a list": lambda T: T.vjp(lambda x: [x.sin(), x.cos()], X)[1]([X, Y]),
    "vjp, a dict": lambda T: T.vjp(lambda x: {"a": x.sin(), "b": (x.cos(),)}, X)[1](
        {"a": X, "b": (Y,)}
    ),
    "vjp, several primals": lambda T: T.vjp(product, X, Y)[1](S),
    "vjp, a dict of primals": lambda T: T.vjp(lambda d: d["a"] * d["b"], {"a": X, "b": Y})[1](X),
    "vjp, has_aux": lambda T: (lambda out, pull, aux: (out, pull(X), aux))(
        *T.vjp(lambda x: (x.sin(), {"a": x}), X, has_aux=True)
    ),
    "vjp of the identity": lambda T: T.vjp(lambda x: x, X)[1](Y),
    "vjp of a constant": lambda T: T.vjp(lambda x: Y, X)[1](Y),
    "vjp, one output twice": lambda T: T.vjp(lambda x: (x, x), X)[1]((X, Y)),
    "vjp without primals": lambda T: T.vjp(lambda: X)[1](X),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_torch_func(name: str) -> None:
    as_torch_func(CALLS[name])


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_argnums(shapes: list[list[int]], data: st.DataObject) -> None:
    """The gradients agree with plain autograd's for each named argument."""
    count = len(shapes)
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    argnums = tuple(data.draw(st.sampled_from([n, n - count])) for n in chosen)
    args = [torch.randn(shape) for shape in shapes]

    def func(*xs: Tensor) -> Tensor:
        total = sum((x.sin().sum() for x in xs), torch.zeros(()))
        return total**2

    leaf = [x.clone().requires_grad_() for x in args]
    want = torch.autograd.grad(func(*leaf), [leaf[n] for n in chosen])
    same(tsfunc.grad(func, argnums=argnums)(*args), want)
    assert not any(g.requires_grad for g in tsfunc.grad(func, argnums=argnums)(*args))


def test_value_and_grad_has_jaxs_order() -> None:
    value, gradient = tsfunc.value_and_grad(scalar)(W)
    same((gradient, value), torch.func.grad_and_value(scalar)(W))
    with_aux = tsfunc.value_and_grad(lambda x: (scalar(x), 3), has_aux=True)(W)
    same(with_aux, ((scalar(W), 3), gradient))


def test_the_auxiliary_part_is_anything() -> None:
    got = tsfunc.grad(lambda x: (scalar(x), {"n": 3, "name": "a", "x": x, "none": None}), 0, True)
    _, aux = got(W)
    same(aux, {"n": 3, "name": "a", "x": W, "none": None})
    assert not aux["x"].requires_grad
    _, _, aux = tsfunc.vjp(lambda x: (x, "a"), W, has_aux=True)
    assert aux == "a"


def test_names_and_docs_are_kept() -> None:
    for transform in (tsfunc.grad, tsfunc.grad_and_value, tsfunc.value_and_grad):
        assert transform(scalar).__name__ == "scalar"


def test_results_that_require_grad() -> None:
    """Results require grad only if they are differentiated outside."""
    leaf = W.clone().requires_grad_()
    for T in (tsfunc, torch.func):
        assert not T.grad(scalar)(W).requires_grad
        assert T.grad(scalar)(leaf).requires_grad
        gradient, value = T.grad_and_value(scalar)(W)
        assert not gradient.requires_grad and not value.requires_grad
        gradient, value = T.grad_and_value(scalar)(leaf)
        assert gradient.requires_grad and value.requires_grad
        out, pull = T.vjp(torch.sin, W)
        assert not out.requires_grad and not pull(W)[0].requires_grad
        assert T.grad(lambda x: (scalar(x), x), has_aux=True)(leaf)[1].requires_grad
        assert not T.grad(lambda x: (scalar(x), x), has_aux=True)(W)[1].requires_grad
    assert W.requires_grad is False


def test_the_grad_mode_of_the_pull_decides() -> None:
    leaf = W.clone().requires_grad_()
    for T in (tsfunc, torch.func):
        out, pull = T.vjp(torch.sin, leaf)
        with torch.no_grad():
            (inside,) = pull(W)
        assert out.requires_grad and not inside.requires_grad
        assert pull(W)[0].requires_grad
        with torch.no_grad():
            out, pull = T.vjp(torch.sin, leaf)
        (g,) = pull(W)
        assert not out.requires_grad and g.requires_grad
        same(torch.autograd.grad(g.sum(), leaf)[0], -W.sin() * W)


def test_the_pullback_has_options_for_its_graph() -> None:
    """They are accepted by position and by name, as in torch.func."""
    x = X.clone().requires_grad_()
    _, pull = tsfunc.vjp(torch.sin, x)
    ones = torch.ones_like(X)
    assert pull(ones)[0].requires_grad
    assert pull(ones, True, True)[0].requires_grad
    assert not pull(ones, create_graph=False)[0].requires_grad
    with torch.no_grad():
        assert not pull(ones)[0].requires_grad
        (pulled,) = pull(ones, create_graph=True)
        assert pulled.requires_grad
    same(torch.autograd.grad(pulled.sum(), x)[0], -X.sin())
    _, pull = tsfunc.vjp(lambda x: x.sin() * 2, X)
    same(pull(ones, retain_graph=False)[0], 2 * X.cos())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        pull(ones)


def test_the_input_is_not_changed() -> None:
    leaf = W.clone().requires_grad_()
    tsfunc.grad(scalar)(leaf)
    assert leaf.grad is None
    assert leaf.is_leaf


def test_ordinary_autograd_inside() -> None:
    def func(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return g.sum()

    same(tsfunc.grad(func)(W), 6 * W)
    same(tsfunc.vmap(tsfunc.grad(func))(X), 6 * X)


ARGUMENTS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: tsfunc.grad(product, anything([0]))(X, Y),
        RuntimeError,
        "argnums must be int or Tuple",
    ),
    (
        lambda: tsfunc.grad(product, anything("a"))(X, Y),
        RuntimeError,
        "argnums must be int or Tuple",
    ),
    (lambda: tsfunc.grad(product, ())(X, Y), RuntimeError, "argnums must be non-empty"),
    (
        lambda: tsfunc.grad(product, anything((0.5,)))(X, Y),
        RuntimeError,
        "argnum must be int, got: <class",
    ),
    (
        lambda: tsfunc.grad(lambda x, y: x * y, 2)(X, Y),
        RuntimeError,
        "argnum=2, but only 2 positional inputs: x, y. Arguments that are passed by name have no "
        "number",
    ),
    (
        lambda: tsfunc.grad(lambda m, x: m(x).sum())(torch.nn.Linear(3, 1), X),
        ValueError,
        "got <class 'torch.nn.modules.linear.Linear'>. It is m. Pass its parameters, "
        "dict(module.named_parameters()), and call it by functional_call(module, params, (x,)).",
    ),
    (
        lambda: tsfunc.grad(lambda x, p: scalar(x), 1)(W, {"k": [W, 3.0]}),
        ValueError,
        "got <class 'float'>. It is p['k'][1].",
    ),
    (lambda: tsfunc.grad(product, -3)(X, Y), RuntimeError, "argnum=-3, but only 2 positional"),
    (lambda: tsfunc.grad(scalar)(x=W), RuntimeError, "argnum=0, but only 0 positional inputs"),
    (
        lambda: tsfunc.grad(product, (0, -2))(X, Y),
        RuntimeError,
        "argnums elements must be unique, got (0, -2)",
    ),
    (
        lambda: tsfunc.grad(scalar)(3.0),  # type: ignore[arg-type]
        ValueError,
        "grad_and_value(f)(*args): Expected the differentiated arguments to only contain Tensors. "
        "Thing passed to transform API must be Tensor, got <class 'float'>",
    ),
    (
        lambda: tsfunc.grad(scalar)({"a": None}),  # type: ignore[arg-type]
        ValueError,
        "must be Tensor, got <class 'NoneType'",
    ),
    (
        lambda: tsfunc.grad(torch.sin)(W),
        RuntimeError,
        "grad_and_value(f)(*args): Expected f(*args) to return a scalar Tensor, got tensor with 1 "
        "dims. Maybe you wanted to use the vjp or jacrev APIs instead?",
    ),
    (
        lambda: tsfunc.grad(lambda x: x.sum() * 1j)(W),
        RuntimeError,
        "grad can be implicitly created only for real scalar outputs but got torch.complex64",
    ),
    (
        lambda: tsfunc.grad(lambda x: 3.0)(W),
        RuntimeError,
        "Expected f(*args) to return a Tensor, got <class 'float'>.\n",
    ),
    (
        lambda: tsfunc.grad(lambda x: (scalar(x), x))(W),
        RuntimeError,
        "got <class 'tuple'>. With an auxiliary output, pass has_aux=True.",
    ),
    (
        lambda: tsfunc.grad(scalar, has_aux=True)(W),
        RuntimeError,
        "grad_and_value(f)(*args): output of function f should be a tuple: (output, aux) if "
        "has_aux is True, got <class 'torch.Tensor'>",
    ),
    (
        lambda: tsfunc.grad_and_value(lambda x: [scalar(x), x], has_aux=True)(W),
        RuntimeError,
        "output of function f should be a tuple: (output, aux)",
    ),
    (
        lambda: tsfunc.grad(lambda x: (scalar(x), x, x), has_aux=True)(W),
        RuntimeError,
        "output of function f should be a tuple: (output, aux)",
    ),
    (
        lambda: tsfunc.grad(lambda x, n: x.sum(), (0, -1))(W, {"n": torch.ones(2).long()}),
        RuntimeError,
        "n['n'] of torch.int64 can't be differentiated by: only Tensors of floating point",
    ),
    (
        lambda: tsfunc.vjp(lambda x, n: x.sum(), W, torch.ones(2).long()),
        RuntimeError,
        "n of torch.int64 can't be differentiated by: only Tensors of floating point",
    ),
    (
        lambda: tsfunc.vjp(torch.sin, 3.0),
        ValueError,
        "vjp(f, *primals): Expected primals to only contain Tensors. Thing passed to transform API "
        "must be Tensor, got <class 'float'>",
    ),
    (
        lambda: tsfunc.vjp(lambda x: (), W),
        RuntimeError,
        "vjp(f, *primals): Expected f to be a function that has non-empty output (got output = ())",
    ),
    (
        lambda: tsfunc.vjp(lambda x: None, W),
        RuntimeError,
        "vjp(f, *primals): Expected f to be a function that has non-empty output",
    ),
    (
        lambda: tsfunc.vjp(lambda x: 3, W),
        RuntimeError,
        "vjp(f, *primals): expected f(*primals) to return only tensors, got unsupported type "
        "<class 'int'>",
    ),
    (
        lambda: tsfunc.vjp(torch.sin, W, has_aux=True),
        RuntimeError,
        "vjp(f, *primals): output of function f should be a tuple: (output, aux) if has_aux is ",
    ),
    (
        lambda: tsfunc.vjp(lambda x: (x, x), W)[1]([W, W]),  # type: ignore[arg-type]
        RuntimeError,
        "vjp_fn(cotangents): Expected pytree structure of cotangents to be the same as pytree "
        "structure of outputs to the function. cotangents:",
    ),
    (
        lambda: tsfunc.vjp(torch.sin, W)[1](1.0),  # type: ignore[arg-type]
        RuntimeError,
        "vjp_fn(cotangents): Expected Tensors, got <class 'float'>",
    ),
    (
        lambda: tsfunc.vjp(torch.sin, W)[1](X),
        RuntimeError,
        "vjp_fn(cotangents): expected a cotangent of shape (4,), as the output, got one of shape "
        "(3, 4)",
    ),
]


test_mistakes_in_calls_of_vjp_and_grad_have_messages = messages_of_mistakes(ARGUMENTS)


def test_tensors_differentiated_only_outside_a_trace_have_no_gradient_inside() -> None:
    """The inner gradient is by the inner variable alone: zero."""
    f = tsfunc.specialize(lambda x: tsfunc.grad(lambda z: x.sin().sum())(x) + x)
    x = torch.tensor([0.3, -1.0])
    torch.testing.assert_close(tsfunc.grad(lambda x: f(x).sum())(x), torch.ones(2))
    per_example = tsfunc.vmap(tsfunc.grad(lambda x: f(x).sum()))
    torch.testing.assert_close(per_example(x.expand(3, 2)), torch.ones(3, 2))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [[2, 1, 3, 4], [2, 1, 2, 3, 4]])
def test_a_formula_that_changes_shapes_in_place_in_programs(size: list[int], aligned: bool) -> None:
    n = len(size) - 2

    def total(theta: Tensor) -> Tensor:
        return torch.nn.functional.affine_grid(theta, size, align_corners=aligned).square().sum()

    theta = torch.randn(2, n, n + 1)
    want = torch.func.grad(total)(theta)
    same(tsfunc.specialize(tsfunc.grad(total))(theta), want)
    f = tsfunc.vmap(tsfunc.grad(total), in_dims=3)
    same(tsfunc.specialize(f)(torch.stack([theta, theta], 3)), torch.stack([want, want]))
