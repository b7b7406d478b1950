"""jacrev, jacfwd and hessian agree with torch.func's; their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tsfunc
from tests.transforms.support import Api, as_torch_func, messages_of_mistakes, same

X = torch.arange(12.0).view(3, 4).sin()
Y = X.cos()
W = torch.arange(4.0).cos()


def product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * b, a.sum()


BOTH: dict[str, Callable[[Any], Any]] = {
    "one": lambda jac: jac(torch.sin)(W),
    "argnums": lambda jac: jac(product, argnums=1)(X, Y),
    "argnums, a tuple": lambda jac: jac(product, argnums=(0, 1))(X, Y),
    "argnums, out of order": lambda jac: jac(product, argnums=(1, 0))(X, Y),
    "argnums, a tuple of one": lambda jac: jac(torch.sin, argnums=(0,))(W),
    "inputs of several shapes": lambda jac: jac(lambda a, b: a.sum() + b, argnums=(0, 1))(X, W),
    "has_aux": lambda jac: jac(lambda a: (a.sin(), {"q": a}), has_aux=True)(W),
    "outputs in a tree": lambda jac: jac(lambda a: {"u": a.sin(), "v": (a.cos(), a.sum())})(W),
    "inputs in a tree": lambda jac: jac(lambda d: d["a"] * d["b"][0])({"a": W, "b": [W + 1]}),
    "a constant": lambda jac: jac(lambda a: Y)(W),
    "partly a constant": lambda jac: jac(lambda a: (a, Y))(W),
    "a scalar": lambda jac: jac(torch.sum)(W),
    "of a scalar": lambda jac: jac(lambda a: a * W)(torch.tensor(2.0)),
    "an unbatched constant inside": lambda jac: jac(lambda a: torch.outer(a, W) @ a)(W),
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("jac", ["jacrev", "jacfwd"])
def test_as_torch_func(jac: str, name: str) -> None:
    as_torch_func(lambda T: BOTH[name](getattr(T, jac)))


def test_argnums_from_the_end() -> None:
    for jac in (tsfunc.jacrev, tsfunc.jacfwd):
        same(jac(product, argnums=-1)(X, Y), torch.func.jacrev(product, argnums=1)(X, Y))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 13, 100, None])
def test_jacobians_in_chunks_equal_whole_ones(chunk_size: int | None) -> None:
    got = tsfunc.jacrev(product, argnums=(0, 1), chunk_size=chunk_size)(X, Y)
    same(got, torch.func.jacrev(product, argnums=(0, 1))(X, Y))


@pytest.mark.parametrize("jac", ["jacrev", "jacfwd"])
def test_another_argument_is_written_into(jac: str) -> None:
    """The argument has the written values, even if the derivative depends on them."""

    def overwritten(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x * x)

    def partly(x: Tensor, y: Tensor) -> Tensor:
        x[1:3] = y
        return torch.stack([x.square().sum(), y.sum()])

    def build(T: Api) -> Any:
        out, x = torch.zeros(4), W.clone()
        result = getattr(T, jac)(overwritten)(W, out)
        return result, getattr(T, jac)(partly, argnums=1)(x, W[:2]), out.detach(), x.detach()

    as_torch_func(build)
    messages: list[str] = []
    getattr(tsfunc, jac)(lambda x, log: (log.append("ran"), x * 2)[1])(W, messages)
    assert messages == ["ran"]


def test_one_row_is_no_vmap() -> None:
    """A backward pass may then use operations that a vmap refuses."""

    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            assert g.sum().item() == 1.0
            assert len(g.nonzero()) == 1
            return g * 2

    same(tsfunc.jacrev(Picky.apply, chunk_size=1)(W), 2 * torch.eye(4))
    with pytest.raises(RuntimeError, match=r"calling .item.. on a Tensor"):
        tsfunc.jacrev(Picky.apply, chunk_size=2)(W)
    assert tsfunc.jacrev(torch.sin, chunk_size=1)(W[:0]).shape == (0, 0)
    for chunk_size in (None, 2, "auto"):  # the function has one row
        rows = tsfunc.jacrev(Picky.apply, chunk_size=chunk_size)
        same(rows(W[:1]), torch.tensor([[2.0]]))


def test_preallocate_is_accepted() -> None:
    got = tsfunc.jacrev(product, chunk_size=2, _preallocate_and_copy=True)(X, Y)
    same(got, torch.func.jacrev(product)(X, Y))


@settings(max_examples=30)
@given(shape=st.lists(st.integers(1, 3), max_size=2), out=st.lists(st.integers(1, 3), max_size=2))
def test_any_shape(shape: list[int], out: list[int]) -> None:
    """Both agree with the Jacobian of plain autograd, row by row."""
    weights = torch.randn([*out, *shape], dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)

    def func(x: Tensor) -> Tensor:
        return torch.tanh(torch.tensordot(weights, x.sin(), dims=len(shape)))

    want = torch.autograd.functional.jacobian(func, x)
    same(tsfunc.jacrev(func)(x), want)
    same(tsfunc.jacfwd(func)(x), want)


HESSIANS: dict[str, Callable[[Api], Any]] = {
    "one": lambda T: T.hessian(lambda x: (x**3).sum())(W),
    "of a vector": lambda T: T.hessian(torch.sin)(W),
    "argnums": lambda T: T.hessian(lambda a, b: (a * b**3).sum(), argnums=1)(X, Y),
    "argnums, a tuple": lambda T: T.hessian(lambda a, b: (a * b**3).sum(), argnums=(0, 1))(X, Y),
    "a tree": lambda T: T.hessian(lambda d: (d["a"] ** 2 * d["b"]).sum())({"a": W, "b": W + 1}),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_hessian_as_torch_func(name: str) -> None:
    as_torch_func(HESSIANS[name])


@settings(max_examples=10)
@given(sizes=st.tuples(*[st.integers(1, 5)] * 3), ends=st.sampled_from([(), (1,), (1, 1)]))
def test_a_hessian_of_one_number_does_its_work_once(
    sizes: tuple[int, int, int], ends: tuple[int, ...]
) -> None:
    """Its products are those of torch.func's, and no more."""
    examples, features, width = sizes
    x, weights = torch.randn(examples, features), torch.randn(features, width)

    def loss(weights: Tensor) -> Tensor:
        return (x @ weights).tanh().square().sum().view(ends)

    def flops(hessian: Callable[..., Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            hessian(loss)(weights)
        return counter.get_total_flops()

    assert flops(tsfunc.hessian) == flops(torch.func.hessian)


def test_keyword_arguments_and_empty_tensors() -> None:
    for jac in (tsfunc.jacrev, tsfunc.jacfwd):
        same(jac(lambda a, *, k: a * k)(W, k=Y), torch.func.jacrev(lambda a: a * Y)(W))
        same(jac(torch.sin)(torch.zeros(0)), torch.zeros(0, 0))


def test_hessian_takes_keyword_arguments() -> None:
    same(tsfunc.hessian(lambda a, *, k: (a**k).sum())(W, k=3), torch.diag(6 * W))


def test_random_numbers_of_jacobians() -> None:
    def noisy(a: Tensor) -> Tensor:
        return a * torch.rand(4)

    with pytest.raises(RuntimeError, match="called random operation while in randomness error"):
        tsfunc.jacfwd(noisy)(W)
    one = torch.diagonal(tsfunc.jacfwd(noisy, randomness="same")(W))
    torch.manual_seed(0)
    assert ((one >= 0) & (one <= 1)).all()
    assert tsfunc.jacfwd(noisy, randomness="different")(W).shape == (4, 4)
    assert tsfunc.jacrev(noisy)(W).shape == (4, 4)


MESSAGES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: tsfunc.jacrev(torch.sin, chunk_size=0),
        ValueError,
        "jacrev: chunk_size should be None or greater than 0. (got 0)",
    ),
]
COMPLEX = torch.complex(W, W)


def messages_of(name: str) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    jac: Any = getattr(tsfunc, name)
    return [
        (lambda: jac(product, argnums=2)(X, Y), RuntimeError, "only 2 positional inputs"),
        (lambda: jac(product, argnums=(0, 0))(X, Y), RuntimeError, "must be unique"),
        (lambda: jac(product, argnums=())(X, Y), RuntimeError, "must be non-empty"),
        (lambda: jac(torch.sin, argnums=0.0)(W), RuntimeError, "must be int or Tuple"),
        (lambda: jac(torch.sin)(3.0), ValueError, "must be Tensor, got <class 'float'>"),
        (lambda: jac(lambda a: 3)(W), RuntimeError, "to return only tensors, got unsupported"),
        (lambda: jac(lambda a: ())(W), RuntimeError, "function that has non-empty output"),
        (lambda: jac(lambda a: None)(W), RuntimeError, "function that has non-empty output"),
        (lambda: jac(torch.sin, has_aux=True)(W), RuntimeError, "should be a tuple: (output, "),
        (
            lambda: jac(torch.abs)(COMPLEX),
            RuntimeError,
            f"{name}: Expected all inputs to be real but received complex tensor at flattened "
            f"input idx: 0",
        ),
        (
            lambda: jac(lambda a: torch.complex(a, a))(W),
            RuntimeError,
            f"{name}: Expected all outputs to be real but received complex tensor",
        ),
        (
            lambda: jac(lambda x, n: x * n, argnums=1)(W, W.long()),
            RuntimeError,
            "n of torch.int64 can't be differentiated by",
        ),
    ]


MESSAGES += messages_of("jacrev") + messages_of("jacfwd")


test_mistakes_in_calls_of_jacobians_have_messages = messages_of_mistakes(MESSAGES)
