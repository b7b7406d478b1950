"""Each difference from torch.func in docs/torch_func.md is as the page says."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor

import tsfunc
from tests.transforms.support import Api, same

X = torch.arange(1.0, 13.0).view(3, 4) / 7
IMAGES = torch.arange(120.0).view(2, 1, 3, 4, 5)
PAGE = (Path(__file__).parents[2] / "docs" / "torch_func.md").read_text()


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 * x


class WithoutRule(OldStyle):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


def kept(x: Tensor) -> Tensor:
    y = x.sin()
    y.retain_grad()
    return y.sum()


def hooked(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return x.sin().sum()


def differentiated_inside(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(x.sin().sum(), x)[0]


def rrelu(T: Api) -> Any:
    out = T.vmap(lambda x: torch.rrelu(-x, 0.5, 0.5, True), randomness="same")(X)
    return out + X / 2


def ragged(T: Api) -> Any:
    nested = torch.nested.as_nested_tensor([X, X[:2]], layout=torch.jagged)
    out = T.vmap(lambda x: T.vmap(torch.sum)(x).sum())(nested)
    return out - torch.stack([X.sum(), X[:2].sum()])


def compressed(T: Api) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the layout
        return T.vmap(lambda x: x @ x.to_dense().T)((X[:, :, None] + 2).to_sparse_csr())


def masked(lib: Any) -> Any:
    return lib.vmap(lambda row: row[row > 0].mean())(X)


CASES: dict[str, tuple[Callable[[Api], Any], Any]] = {
    "outputs that are not tensors": (lambda T: T.vmap(lambda x: (x, 3))(X), (X, 3)),
    "an auxiliary output": (
        lambda T: T.grad(lambda x: (x.sum(), "aux"), has_aux=True)(X),
        (torch.ones_like(X), "aux"),
    ),
    "`out=` of an operator": (lambda T: T.vmap(lambda x: torch.abs(-x, out=x * 1))(X), X),
    "`x.data`": (lambda T: T.vmap(lambda x: x.data * 2)(X), X * 2),
    "with channels last": (
        lambda T: T.vmap(lambda x: x.clone(memory_format=torch.channels_last))(IMAGES),
        IMAGES,
    ),
    "`x.view(...)`": (
        lambda T: T.vmap(lambda x: x.view(-1), in_dims=1)(IMAGES[0, 0]),
        IMAGES[0, 0].movedim(1, 0).reshape(4, 15),
    ),
    "`torch.autograd.grad`": (lambda T: T.vmap(differentiated_inside)(X), X.cos()),
    "`torch.autograd.functional`": (
        lambda T: T.vmap(lambda x: torch.autograd.functional.jacobian(torch.sin, x))(X),
        torch.diag_embed(X.cos()),
    ),
    "`retain_grad()`": (lambda T: T.grad(kept)(X), X.cos()),
    "hooks on saved tensors": (lambda T: T.grad(hooked)(X), X.cos()),
    "without `setup_context`": (
        lambda T: T.vmap(T.grad(lambda x: OldStyle.apply(x).sum()))(X),  # type: ignore[no-untyped-call]
        2 * X,
    ),
    "without a rule": (lambda T: T.vmap(WithoutRule.apply)(X), X * X),
    "drawing into a tensor that is made inside": (
        lambda T: T.vmap(lambda x: torch.empty(3).uniform_() * 0, randomness="different")(X),
        0 * X[:, :1].expand(len(X), 3),
    ),
    "`x[mask]`": (masked, torch.stack([row[row > 0].mean() for row in X])),
    "`torch.cond`": (
        lambda T: T.jvp(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (X,), (X,)),
        (X.sin(), X * X.cos()),
    ),
    "`rrelu`": (rrelu, torch.zeros_like(X)),
    "nested tensors at several levels": (ragged, torch.zeros(2)),
    "tensors in compressed sparse layouts": (
        compressed,
        (X[:, :, None] + 2) @ (X[:, None, :] + 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_that_torch_func_refuses(name: str) -> None:
    build, want = CASES[name]
    assert all(word in PAGE for word in name.split(" or "))
    with pytest.raises((RuntimeError, ValueError)):
        build(torch.func)
    same(build(tsfunc), want)


def test_a_dim_out_of_range() -> None:
    for T, kind in ((tsfunc, IndexError), (torch.func, RuntimeError)):
        with pytest.raises(kind, match=r"[Dd]im"):
            T.vmap(lambda x: torch.squeeze(x, 1))(torch.rand(9))


def test_a_tensor_from_outside_that_is_written_into() -> None:
    captured = torch.zeros(4)

    def func(x: Tensor) -> Tensor:
        captured.copy_(x)
        return (x * captured).sum()

    same(tsfunc.grad(func)(X[0]), 2 * X[0])
    assert captured.requires_grad
    captured = torch.zeros(4)
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        torch.func.grad(func)(X[0])
    captured = torch.zeros(4)
    with pytest.raises(RuntimeError, match="made outside of"):
        tsfunc.vmap(lambda y: tsfunc.grad(func)(X[0]) * y)(X)


def test_backward_of_an_output_of_vjp_frees_the_graph_of_the_pullback() -> None:
    ones = torch.ones_like(X)
    for api in (tsfunc, torch.func):
        leaf = X.clone().requires_grad_()
        out, pull = api.vjp(torch.sin, leaf)
        out.sum().backward(retain_graph=True)
        torch.testing.assert_close(pull(ones)[0], X.cos())
        out.sum().backward()
        if api is torch.func:
            pull(ones)
        else:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                pull(ones)


def test_a_tensor_from_outside_that_jvp_writes_into() -> None:
    captured = torch.zeros(4)

    def func(x: Tensor) -> Tensor:
        captured.copy_(x)
        return (x * captured).sum()

    args = (X[0],), (torch.ones(4),)
    value, tangent = tsfunc.jvp(func, *args)
    same(value, X[0].square().sum())
    same(tangent, 2 * X[0].sum())
    same(captured, X[0])
    same(tsfunc.jvp(lambda y: (y * captured).sum(), *args)[1], X[0].sum())
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        torch.func.jvp(func, *args)
    with pytest.raises(RuntimeError, match="made outside of"):
        tsfunc.jvp(lambda x: tsfunc.jvp(func, (x,), (torch.ones(4),))[1], *args)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("upper", [False, True])
def test_tangents_of_triangular_systems(upper: bool, transpose: bool) -> None:
    matrix = X[:, :3] + 2 * torch.eye(3)

    def solution(a: Tensor) -> Tensor:
        return torch.triangular_solve(X, a, upper=upper, transpose=transpose).solution

    reverse = torch.func.jacrev(solution)(matrix)
    same(tsfunc.jacrev(solution)(matrix), reverse)
    same(tsfunc.jacfwd(solution)(matrix), reverse)
    assert not torch.allclose(torch.func.jacfwd(solution)(matrix), reverse)


def test_contiguous_copies_for_a_batch_between_dims_and_reshape_does_not() -> None:
    x = torch.arange(12.0).reshape(2, 1, 2, 3)

    def written(x: Tensor, alias: Callable[[Tensor], Tensor]) -> Tensor:
        y = x.clone()
        alias(y)[-1] = 100.0
        return y

    for one in (tsfunc.vmap, torch.func.vmap):
        got = one(lambda x: written(x, lambda y: y.contiguous()), in_dims=2)(x)
        same(got, x.movedim(2, 0))
    aliases: list[Callable[[Tensor], Tensor]] = [lambda y: y.reshape(-1), lambda y: y.view(-1)]
    for alias in aliases:
        want = torch.stack([written(e.contiguous(), alias) for e in x.unbind(2)])
        same(tsfunc.vmap(functools.partial(written, alias=alias), in_dims=2)(x), want)


@pytest.mark.parametrize("outer", ["jacrev", "jacfwd"])
@pytest.mark.parametrize("inner", ["jacrev", "jacfwd"])
def test_second_derivatives_of_layer_norm(outer: str, inner: str) -> None:
    values = torch.randn(20, dtype=torch.float64)

    def loss(values: Tensor) -> Tensor:
        x, weight, bias = values[:12].view(3, 4), values[12:16], values[16:]
        return torch.nn.functional.layer_norm(x, (4,), weight, bias).pow(3).sum()

    want = torch.autograd.functional.hessian(loss, values)
    same(getattr(tsfunc, outer)(getattr(tsfunc, inner)(loss))(values), want)
    wrong = getattr(torch.func, outer)(getattr(torch.func, inner)(loss))(values)
    assert not torch.allclose(wrong, want, atol=1e-3)


def test_tangents_of_eigh_that_are_not_symmetric() -> None:
    def loss(a: Tensor) -> Tensor:
        return (torch.linalg.eigh(a)[1].square() * torch.arange(9.0).view(3, 3)).sum()

    x = torch.randn(3, 3, dtype=torch.float64) + torch.diag(torch.tensor([0.0, 4.0, 9.0]))
    x = x + x.mT
    want = torch.autograd.functional.hessian(loss, x)
    same(tsfunc.hessian(loss)(x), want)
    assert not torch.allclose(torch.func.hessian(loss)(x), want, atol=1e-3)


def test_gradients_through_complex_singular_vectors() -> None:
    def loss(x: Tensor) -> Tensor:
        return torch.linalg.svd(x * (1 + 1j))[0].abs()[0, 0]

    x = torch.randn(2, 3, 3, dtype=torch.float64)
    same(tsfunc.vmap(tsfunc.grad(loss))(x), torch.stack([tsfunc.grad(loss)(e) for e in x]))
    with pytest.raises(RuntimeError, match="allclose"):
        torch.func.vmap(torch.func.grad(loss))(x)


@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_numbers_of_dropouts(in_dim: int, inplace: bool) -> None:
    x = torch.rand(300, 300) + 1

    def drawn(api: Api, differentiated: bool) -> Tensor:
        def dropped(x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x * 1, 0.25, inplace=inplace)

        f = api.grad(lambda x: dropped(x).sum()) if differentiated else dropped
        torch.manual_seed(7)
        return api.vmap(f, in_dim, randomness="different")(x) != 0

    for differentiated in (False, True):
        got, want = drawn(tsfunc, differentiated), drawn(torch.func, differentiated)
        assert got.equal(want) == (in_dim == 0 or not (inplace or differentiated))
        # 4 standard deviations of the mean of 90,000 numbers
        assert abs(got.double().mean() - 0.75) < 4 * (0.75 * 0.25 / x.numel()) ** 0.5


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch.func loops
def test_sizes_that_depend_on_values() -> None:
    counts = torch.tensor([[1, 2], [2, 1]])
    for f, args in (
        (torch.argwhere, (counts - 1,)),
        (torch.bincount, (counts,)),
        (torch.repeat_interleave, (X[:2, :2], counts)),
    ):
        want = torch.stack([f(*example) for example in zip(*args, strict=True)])
        if f is not torch.repeat_interleave:
            same(torch.func.vmap(f)(*args), want)
        with pytest.raises(tsfunc.errors.DataDependentError, match="depends on the values"):
            tsfunc.vmap(f)(*args)
        same(tsfunc.vmap(f, data_dependent="split")(*args), want)
    repeat = functools.partial(torch.repeat_interleave, output_size=3)
    same(tsfunc.vmap(repeat)(X[:2, :2], counts), torch.func.vmap(repeat)(X[:2, :2], counts))
    ragged = tsfunc.vmap(torch.bincount, data_dependent="split")(torch.tensor([[1, 2], [0, 0]]))
    assert [row.tolist() for row in ragged.unbind()] == [[0, 1, 1], [2]]


def test_derivatives_by_the_weights_of_a_cross_entropy() -> None:
    x, target, weight = torch.rand(3, 3).unbind()

    def loss(weight: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x, target, pos_weight=weight)

    want = torch.func.grad(loss)(weight)
    torch.testing.assert_close(tsfunc.vmap(tsfunc.grad(loss))(weight[None])[0], want)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument"):
        tsfunc.grad(loss)(weight)
