"""Compositions of transforms, in any order and depth, against the same nesting in torch.func."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.func
import torch.utils.checkpoint
from torch import Tensor

import tsfunc
from tests.transforms.support import Api, as_torch_func, same

Build = Callable[[Api], Any]


def scalar(x: Tensor) -> Tensor:
    return (x.sin() ** 3).sum()


def vector(x: Tensor) -> Tensor:
    return torch.tanh(x) * x.sum()


def without_grad(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.no_grad():
            return func(*args)

    return run


def partly_constant(x: Tensor) -> Tensor:
    with torch.no_grad():
        c = x**2
    return (x**3 - c * x).sum()


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 4, generator=g) for _ in range(2))
    return x, y, torch.randn(4, generator=g), torch.tensor(0.7)


X, Y, W, S = inputs()
ONE = torch.ones(())

NESTINGS: dict[str, Build] = {
    "vmap(grad)": lambda T: T.vmap(T.grad(scalar))(X),
    "vmap(vmap(grad))": lambda T: T.vmap(T.vmap(T.grad(scalar)))(torch.stack([X, Y])),
    "grad(vmap)": lambda T: T.grad(lambda x: T.vmap(vector)(x).sum())(X),
    "grad(vmap(grad))": lambda T: T.grad(lambda x: T.vmap(T.grad(scalar))(x).pow(2).sum())(X),
    "vmap(grad(vmap))": lambda T: T.vmap(T.grad(lambda x: T.vmap(lambda a: a * a.sin())(x).sum()))(
        X
    ),
    "vmap(grad(grad))": lambda T: T.vmap(T.grad(lambda x: T.grad(scalar)(x).sum()))(X),
    "grad(grad(grad))": lambda T: T.grad(T.grad(T.grad(lambda x: x**5)))(S),
    "grad, five times": lambda T: T.grad(T.grad(T.grad(T.grad(T.grad(torch.sin)))))(S),
    "vmap(grad(grad(grad)))": lambda T: T.vmap(T.grad(T.grad(T.grad(lambda x: x**5))))(W),
    "jacfwd(jacrev)": lambda T: T.jacfwd(T.jacrev(vector))(W),
    "jacrev(jacfwd)": lambda T: T.jacrev(T.jacfwd(vector))(W),
    "jacrev(jacrev)": lambda T: T.jacrev(T.jacrev(vector))(W),
    "jacfwd(jacfwd)": lambda T: T.jacfwd(T.jacfwd(vector))(W),
    "jacrev, three times": lambda T: T.jacrev(T.jacrev(T.jacrev(scalar)))(W),
    "jacfwd, three times": lambda T: T.jacfwd(T.jacfwd(T.jacfwd(scalar)))(W),
    "jacfwd(hessian)": lambda T: T.jacfwd(T.hessian(scalar))(W),
    "jacrev(hessian)": lambda T: T.jacrev(T.hessian(scalar))(W),
    "vmap(hessian)": lambda T: T.vmap(T.hessian(scalar))(X),
    "vmap(vmap(hessian))": lambda T: T.vmap(T.vmap(T.hessian(scalar)))(torch.stack([X, Y])),
    "vmap(jacfwd(hessian))": lambda T: T.vmap(T.jacfwd(T.hessian(scalar)))(X),
    "hessian(vmap)": lambda T: T.hessian(lambda x: T.vmap(vector)(x).sum())(X),
    "grad(vmap(hessian))": lambda T: T.grad(lambda x: T.vmap(T.hessian(scalar))(x).pow(2).sum())(X),
    "vmap of a Laplacian": lambda T: T.vmap(lambda x: torch.trace(T.hessian(scalar)(x)))(X),
    "vmap of a divergence": lambda T: T.vmap(lambda x: torch.trace(T.jacrev(vector)(x)))(X),
    "vmap(jacfwd)": lambda T: T.vmap(T.jacfwd(vector))(X),
    "vmap(jacrev)": lambda T: T.vmap(T.jacrev(vector))(X),
    "jacfwd(vmap)": lambda T: T.jacfwd(T.vmap(vector))(X),
    "jacrev(vmap)": lambda T: T.jacrev(T.vmap(vector))(X),
    "jvp(grad)": lambda T: T.jvp(T.grad(scalar), (W,), (W * 2,)),
    "grad(jvp)": lambda T: T.grad(lambda x: T.jvp(vector, (x,), (W,))[1].sum())(W),
    "grad(jvp) by the tangent": lambda T: T.grad(lambda v: T.jvp(vector, (W,), (v,))[1].sum())(W),
    "jvp(jvp)": lambda T: T.jvp(lambda x: T.jvp(vector, (x,), (W,)), (W,), (W + 1,)),
    "jvp(jvp(jvp))": lambda T: T.jvp(
        lambda x: T.jvp(lambda y: T.jvp(vector, (y,), (W,)), (x,), (W,)), (W,), (W + 1,)
    ),
    "vmap(jvp)": lambda T: T.vmap(lambda x, v: T.jvp(vector, (x,), (v,)))(X, Y),
    "vmap(jvp), primal not mapped": lambda T: T.vmap(lambda v: T.jvp(vector, (W,), (v,)))(Y),
    "vmap(jvp), tangent not mapped": lambda T: T.vmap(lambda x: T.jvp(vector, (x,), (W,)))(Y),
    "jvp(vmap)": lambda T: T.jvp(T.vmap(vector), (X,), (Y,)),
    "jvp(vmap(grad))": lambda T: T.jvp(T.vmap(T.grad(scalar)), (X,), (Y,)),
    "vmap(jvp(grad))": lambda T: T.vmap(lambda a, b: T.jvp(T.grad(scalar), (a,), (b,)))(X, Y),
    "vmap(grad(jvp))": lambda T: T.vmap(
        lambda a, b: T.grad(lambda z: T.jvp(scalar, (z,), (b,))[1])(a)
    )(X, Y),
    "grad(vmap(jvp))": lambda T: T.grad(
        lambda x: T.vmap(lambda a: T.jvp(vector, (a,), (W,))[1].sum())(x).sum()
    )(X),
    "vmap(vjp)": lambda T: T.vmap(lambda x, v: T.vjp(vector, x)[1](v))(X, Y),
    "vmap of a pullback": lambda T: T.vmap(T.vjp(vector, W)[1])(X),
    "vjp(vmap)": lambda T: T.vjp(T.vmap(vector), X)[1](Y),
    "vjp(vjp)": lambda T: T.vjp(lambda x: T.vjp(vector, x)[1](W)[0], W)[1](W),
    "vjp of a pullback": lambda T: T.vjp(T.vjp(vector, W)[1], W)[1]((W,)),
    "jvp of a pullback": lambda T: T.jvp(lambda v: T.vjp(vector, W)[1](v)[0], (W,), (W,)),
    "grad of a pullback made before": lambda T: (
        lambda pull: T.grad(lambda c: pull(c)[0].pow(2).sum())(W)
    )(T.vjp(vector, W)[1]),
    "vmap(vjp(jvp))": lambda T: T.vmap(
        lambda a, b: T.vjp(lambda z: T.jvp(vector, (z,), (b,))[1], a)[1](b)
    )(X, Y),
    "vmap(jvp(vjp))": lambda T: T.vmap(
        lambda a, b: T.jvp(lambda z: T.vjp(vector, z)[1](b)[0], (a,), (b,))
    )(X, Y),
}

# Values that are constants for an inner transform, and variables for an outer one.
CLOSURES: dict[str, Build] = {
    "x * d(x + y)/dy": lambda T: T.grad(lambda x: x * T.grad(lambda y: x + y)(S))(S),
    "x * d(x * y)/dy": lambda T: T.grad(lambda x: x * T.grad(lambda y: x * y)(S))(S),
    "forward: x * d(x + y)/dy": lambda T: T.jvp(
        lambda x: x * T.jvp(lambda y: x + y, (S,), (ONE,))[1], (S,), (ONE,)
    ),
    "forward: x * d(x * y)/dy": lambda T: T.jvp(
        lambda x: x * T.jvp(lambda y: x * y, (S,), (ONE,))[1], (S,), (ONE,)
    ),
    "d(x * y * y)/dy at y = x": lambda T: T.grad(lambda x: T.grad(lambda y: x * y * y)(x))(S),
    "grad(jvp) at y = x": lambda T: T.grad(lambda x: T.jvp(lambda y: x * y * y, (x,), (x,))[1])(S),
    "jvp(grad) at y = x": lambda T: T.jvp(lambda x: T.grad(lambda y: x * y * y)(x), (S,), (S,)),
    "two vmaps and two grads": lambda T: T.vmap(
        lambda a: T.grad(
            lambda x: (x * T.vmap(lambda b: T.grad(lambda y: x.sum() * y * b)(b))(W)).sum()
        )(a)
    )(X),
    "grad inside of two vmaps": lambda T: T.vmap(
        lambda a: T.vmap(lambda b: T.grad(lambda z: (z * a * b).sum())(W))(Y)
    )(X),
    "an outer input in an inner vmap": lambda T: T.grad(
        lambda x: T.vmap(lambda b: T.grad(lambda y: (x * y * b).sum())(x))(Y).pow(2).sum()
    )(W),
    "two vmaps and two jvps": lambda T: T.vmap(
        lambda a: T.jvp(
            lambda x: T.vmap(lambda b: T.jvp(lambda y: x * y * b, (x,), (b,))[1])(Y), (a,), (W,)
        )
    )(X),
    "one input, mapped in two ways": lambda T: T.grad(
        lambda x: (
            T.vmap(lambda a: a * x.sum())(x).sum()
            + T.vmap(lambda a: a * x.prod(), in_dims=1)(x).sum()
        )
    )(X),
    "outer grad by a closed-over value": lambda T: T.grad(
        lambda u: T.vmap(lambda a: T.grad(lambda z: (z * u).sin().sum())(a))(X).pow(2).sum()
    )(W),
    "vmap(grad) by a closed-over value": lambda T: T.vmap(
        T.grad(lambda u: T.grad(lambda z: (z * u).sin().sum())(W).pow(2).sum())
    )(X),
}

CONSTANTS: dict[str, Build] = {
    "detach under grad": lambda T: T.grad(lambda x: (x.detach() * x).sum())(W),
    "detach under grad(vmap)": lambda T: T.grad(
        lambda x: T.vmap(lambda a: a.detach() * a)(x).sum()
    )(X),
    "detach under grad(vmap(grad))": lambda T: T.grad(
        lambda x: T.vmap(T.grad(lambda a: (a.detach() * a * a).sum()))(x).sum()
    )(X),
    "detach under jvp": lambda T: T.jvp(lambda a: a.detach() * a, (X,), (Y,)),
    "no_grad inside": lambda T: T.grad(partly_constant)(W),
    "no_grad inside vmap(grad)": lambda T: T.vmap(T.grad(partly_constant))(X),
    "no_grad inside grad(vmap)": lambda T: T.grad(lambda x: T.vmap(partly_constant)(x).sum())(X),
    "no_grad inside grad(vmap(grad))": lambda T: T.grad(
        lambda x: T.vmap(T.grad(partly_constant))(x).pow(2).sum()
    )(X),
    "no_grad around an inner grad": lambda T: T.grad(
        lambda x: (without_grad(T.grad(scalar))(x) * x).sum()
    )(W),
    "no_grad around an inner vmap": lambda T: T.grad(
        lambda x: (without_grad(T.vmap(scalar))(x) * x.sum()).sum()
    )(X),
    "no_grad around a vmap in a vmap": lambda T: T.vmap(
        T.grad(lambda x: (without_grad(T.vmap(torch.sin))(x) * x).sum())
    )(X),
    "no_grad outside": lambda T: without_grad(T.grad(scalar))(W),
    "no_grad outside of vmap(grad)": lambda T: without_grad(T.vmap(T.grad(scalar)))(X),
    "no_grad outside of hessian": lambda T: without_grad(T.hessian(scalar))(X),
    "no_grad inside of jvp": lambda T: T.jvp(partly_constant, (W,), (W,)),
    "no_grad inside of vmap(jvp)": lambda T: T.vmap(lambda a: T.jvp(partly_constant, (a,), (W,)))(
        X
    ),
    "no_grad inside and outside": lambda T: without_grad(
        T.grad(lambda x: (x**4 - without_grad(T.grad(lambda z: (z**3).sum()))(x)).sum())
    )(W),
}

EVERY = {**NESTINGS, **CLOSURES, **CONSTANTS}


@pytest.mark.parametrize("name", EVERY)
def test_as_torch_func(name: str) -> None:
    as_torch_func(EVERY[name], rtol=1e-4, atol=1e-5)


def in_a_thread(build: Build) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(build(tsfunc)))
    thread.start()
    thread.join()
    (only,) = found
    return only


@pytest.mark.parametrize("name", ["vmap(grad)", "grad(vmap(grad))", "vmap(hessian)", "jvp(jvp)"])
def test_in_another_thread(name: str) -> None:
    same(in_a_thread(EVERY[name]), EVERY[name](torch.func), rtol=1e-4, atol=1e-5)


def test_a_thread_started_inside_of_a_transform() -> None:
    def func(x: Tensor) -> Tensor:
        inner = in_a_thread(lambda T: T.vmap(T.grad(scalar))(X))
        return x * inner.sum()

    same(tsfunc.vmap(func)(X), X * torch.func.vmap(torch.func.grad(scalar))(X).sum())


def test_several_threads_at_once() -> None:
    names = [n for n in EVERY if n not in ("jacfwd, three times", "jacrev, three times")]
    want = {name: EVERY[name](torch.func) for name in names}
    with ThreadPoolExecutor(4) as pool:
        got = dict(zip(names, pool.map(lambda n: EVERY[n](tsfunc), names), strict=True))
    for name in names:
        try:
            same(got[name], want[name], rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "svdvals": lambda a: torch.linalg.svdvals(a).sum(),
    "inv": lambda a: torch.linalg.inv(a).sum(),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mT).prod(),
    "norm": lambda a: a.norm(),
    "softmax": lambda a: torch.softmax(a, 0)[0, 0],
    "layer_norm": lambda a: torch.nn.functional.layer_norm(a, (3,)).pow(3).sum(),
    "cross_entropy": lambda a: torch.nn.functional.cross_entropy(a, torch.tensor([0, 2, 1])),
    "where": lambda a: torch.where(a > 0, a**3, a**2).sum(),
    "cumprod": lambda a: a.cumprod(0).sum(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_second_derivatives(name: str) -> None:
    """Each path to a Hessian agrees with double backward of plain autograd.

    Some backward formulas (that of ``det``) use saved values without a derivative unless they are
    told that the result will be differentiated again.
    """
    f = FORMULAS[name]
    x = torch.randn(2, 3, 3, dtype=torch.float64) + 2 * torch.eye(3, dtype=torch.float64)
    want = torch.stack([torch.autograd.functional.hessian(f, one) for one in x])
    same(tsfunc.hessian(f)(x[0]), want[0])
    same(tsfunc.vmap(tsfunc.hessian(f))(x), want)
    same(tsfunc.vmap(tsfunc.jacrev(tsfunc.jacrev(f)))(x), want)

    def total(z: Tensor) -> Tensor:
        return tsfunc.vmap(tsfunc.grad(f))(z).pow(2).sum()

    grads = torch.stack([torch.autograd.functional.jacobian(f, one) for one in x])
    want_total = 2 * torch.einsum("nabcd,ncd->nab", want, grads)
    same(tsfunc.grad(total)(x), want_total)
    leaf = x.clone().requires_grad_()
    (by_backward,) = torch.autograd.grad(total(leaf), leaf)
    same(by_backward, want_total)
    tangent = tsfunc.jvp(tsfunc.vmap(tsfunc.grad(f)), (x,), (x,))[1]
    same(tangent, torch.einsum("nabcd,ncd->nab", want, x))


def test_under_inference_mode() -> None:
    want = torch.func.vmap(torch.func.grad(scalar))(X), torch.func.jvp(vector, (W,), (W,))
    with torch.inference_mode():
        made_inside = X.clone()
        same(tsfunc.vmap(tsfunc.grad(scalar))(X), want[0])
        same(tsfunc.vmap(tsfunc.grad(scalar))(made_inside), want[0])
        same(tsfunc.grad(lambda x: tsfunc.vmap(scalar)(x).sum())(made_inside), want[0])
        same(tsfunc.jvp(vector, (W,), (W.clone(),)), want[1])
        _, pull = tsfunc.vjp(torch.sin, made_inside)
        same(pull(torch.ones_like(X))[0], X.cos())
    assert not torch.is_inference_mode_enabled()


def test_checkpoint() -> None:
    """A recomputation in the backward pass is recorded like the first computation."""

    def func(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda z: z.sin().exp().sum(), x, use_reentrant=False
        )

    def plain(x: Tensor) -> Tensor:
        return x.sin().exp().sum()

    same(tsfunc.grad(func)(W), torch.func.grad(plain)(W))
    same(tsfunc.vmap(tsfunc.grad(func))(X), torch.func.vmap(torch.func.grad(plain))(X))
    # The vmap has ended when the function runs again.
    over = tsfunc.grad(lambda x: tsfunc.vmap(func)(x).sum())
    same(over(X), torch.func.grad(lambda x: torch.func.vmap(plain)(x).sum())(X))


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast(where: str) -> None:
    def low(func: Callable[[Tensor], Tensor], when: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return func(x)

        return run if when == where else func

    def product(x: Tensor) -> Tensor:
        return x.view(2, 2) @ x.view(2, 2)

    inner = low(product, "inside")
    got = low(tsfunc.vmap(inner), "outside")(X)
    assert got.dtype is torch.bfloat16
    same(got, torch.stack([low(inner, "outside")(x) for x in X]))
    scalar_of = low(lambda x: inner(x).float().sum(), "outside")
    same(
        tsfunc.vmap(tsfunc.grad(scalar_of))(X),
        torch.func.vmap(torch.func.grad(scalar_of))(X),
        rtol=2e-2,
        atol=2e-2,
    )


def test_the_outer_user_differentiates() -> None:
    """Plain autograd, outside of all transforms, goes through each."""
    x = X.clone().requires_grad_()

    def both(build: Build) -> tuple[Any, Any]:
        (got,) = torch.autograd.grad(build(tsfunc).sum(), x)
        (want,) = torch.autograd.grad(build(torch.func).sum(), x)
        return got, want

    builds: list[Build] = [
        lambda T: T.vmap(T.grad(scalar))(x),
        lambda T: T.vmap(T.hessian(scalar))(x),
        lambda T: T.jacfwd(vector)(x),
        lambda T: T.jacrev(vector)(x),
        lambda T: T.vmap(lambda a: T.jvp(vector, (a,), (a,))[1])(x),
    ]
    for build in builds:
        same(*both(build), rtol=1e-4, atol=1e-5)
