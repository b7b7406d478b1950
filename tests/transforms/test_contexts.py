"""Contexts of torch's around and inside of transforms: autocast, grad modes, hooks, checkpoints."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.func
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import grad, hessian, jacrev, jvp, vjp, vmap
from tsfunc.errors import EscapedTracerError

X = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4).sin()
Y = torch.arange(8.0, dtype=torch.float64).view(2, 4).cos()
W = torch.arange(16.0, dtype=torch.float64).view(4, 4).cos()

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


def layers(x: Tensor) -> Tensor:
    return torch.tanh(x @ W.to(x.dtype)) * x.sin()


def scalar(x: Tensor) -> Tensor:
    return layers(x).exp().sum()


def under(context: Callable[[], AbstractContextManager[Any]], func: Function) -> Function:
    def called(*args: Any) -> Any:
        with context():
            return func(*args)

    return called


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_types_of_the_loop(dtype: torch.dtype) -> None:
    x = X.float()
    weight = W.float()

    def func(x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(x @ weight)
        loss = nnf.cross_entropy(hidden[None], torch.tensor([1]))
        with torch.autocast("cpu", enabled=False):
            exact = x @ weight
        return hidden, hidden.softmax(0), loss, hidden + x, exact, hidden.log_softmax(0)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype)

    want = loop(under(autocast, func), 3)(x)
    assert {part.dtype for part in want} == {dtype, torch.float32}
    same(vmap(under(autocast, func))(x), want)
    same(under(autocast, vmap(func))(x), want)
    same(under(autocast, vmap(func, in_dims=1))(x.T), want)


LISTED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    # Cast to the lower type, directly or through the operators that they call; left alone; cast to
    # the higher type.
    "conv2d": (nnf.conv2d, ((2, 5, 5), (4, 2, 3, 3))),
    "conv_transpose1d": (nnf.conv_transpose1d, ((2, 5), (2, 4, 3))),
    "prelu": (nnf.prelu, ((2, 4), (1,))),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), ((3, 4), (4, 2))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), ((3, 4), (4, 2))),
    "vecdot": (torch.linalg.vecdot, ((3, 4), (3, 4))),
    "cov": (lambda x: torch.cov(x), ((3, 4),)),
    "mv": (torch.mv, ((3, 4), (4,))),
    "dot": (torch.dot, ((4,), (4,))),
    "cdist": (torch.cdist, ((3, 4), (2, 4))),
    "cross_entropy": (lambda x, y: nnf.cross_entropy(x, y.softmax(-1)), ((3, 4), (3, 4))),
    "off": (lambda x, y: _exactly(torch.matmul, x, y), ((3, 4), (4, 2))),
}


def _exactly(func: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return func(*args)


@pytest.mark.parametrize("name", LISTED)
def test_autocast_casts_the_operators_on_its_list(name: str) -> None:
    """Operators that rules call in place of these are not cast."""
    func, shapes = LISTED[name]
    args = [torch.linspace(-1, 1, 3 * math.prod(s)).view(3, *s).sin() for s in shapes]
    inside = under(lambda: torch.autocast("cpu", dtype=torch.bfloat16), func)
    want = torch.stack([inside(*example) for example in zip(*args, strict=True)])
    for mine in (vmap(inside)(*args), under_autocast(vmap(func))(*args)):
        assert mine.dtype is want.dtype
        same(mine, want, rtol=2e-2, atol=2e-2)
    twice = [torch.stack([x, x.flip(0)]) for x in args]
    assert vmap(vmap(inside))(*twice).dtype is want.dtype
    one = [args[0], *(x[0] for x in args[1:])]
    beside = vmap(inside, in_dims=(0, *(None for _ in args[1:])))(*one)
    assert beside.dtype is want.dtype
    gradient = vmap(grad(lambda *a: inside(*a).float().sum()))(*args)
    assert gradient.dtype is torch.float32


def under_autocast(func: Function) -> Function:
    return under(lambda: torch.autocast("cpu", dtype=torch.bfloat16), func)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_derivatives(dtype: torch.dtype) -> None:
    x = X.float()
    tolerance = {"rtol": 0.05, "atol": 0.02}

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype)

    def loss(x: Tensor) -> Tensor:
        return layers(x).float().square().sum()

    inside = under(autocast, loss)
    want = torch.stack([torch.func.grad(inside)(one) for one in x])
    assert want.dtype is torch.float32
    same(vmap(grad(inside))(x), want, **tolerance)
    same(under(autocast, vmap(grad(loss)))(x), want, **tolerance)
    same(vmap(under(autocast, grad(loss)))(x), want, **tolerance)
    same(grad(lambda x: vmap(inside)(x).sum())(x), want, **tolerance)
    same(under(autocast, grad(lambda x: vmap(loss)(x).sum()))(x), want, **tolerance)
    pushed = loop(lambda x: torch.func.jvp(inside, (x,), (x.cos(),)), 3)(x)
    same(vmap(lambda x: jvp(inside, (x,), (x.cos(),)))(x), pushed, **tolerance)


# Grad modes

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("name", MODES)
def test_grad_modes_around(name: str) -> None:
    mode = MODES[name]
    same(under(mode, vmap(layers))(X), loop(layers, 3)(X))
    want = torch.stack([torch.func.grad(scalar)(x) for x in X])
    same(under(mode, vmap(grad(scalar)))(X), want)
    same(under(mode, grad(lambda x: vmap(scalar)(x).sum()))(X), want)
    same(vmap(under(mode, grad(scalar)))(X), want)
    want = torch.stack([torch.func.hessian(scalar)(x) for x in X])
    same(under(mode, vmap(hessian(scalar)))(X), want)


@pytest.mark.parametrize("name", ["no_grad", "enable_grad"])
def test_grad_modes_in_the_function(name: str) -> None:
    """The grad mode of a block decides if its results are constants to every derivative outside."""
    weight = W.clone().requires_grad_()

    def func(x: Tensor, w: Tensor = W) -> Tensor:
        with MODES[name]():
            factor = (x @ w).cos()
        return (factor * (x @ w)).sum()

    want = torch.stack([torch.func.grad(func)(x) for x in X])
    same(vmap(grad(func))(X), want)
    same(grad(lambda x: vmap(func)(x).sum())(X), want)
    pushed = loop(lambda x: torch.func.jvp(func, (x,), (x,)), 3)(X)
    same(vmap(lambda x: jvp(func, (x,), (x,)))(X), pushed)
    out = vmap(lambda x: func(x, weight))(X).sum()
    alone = sum(func(x, weight) for x in X)
    assert isinstance(alone, Tensor)
    same(torch.autograd.grad(out, weight), torch.autograd.grad(alone, weight))


def test_inference_mode_in_the_function() -> None:
    def func(x: Tensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        with torch.inference_mode():
            part = doubled[1:]
            doubled[0] = x[1]
            made = x.exp()
            made[1:].mul_(x[0])
            out = torch.zeros(4, dtype=x.dtype)
            tail = out[2:]
            tail.copy_(x[2:])
            out[0] = x[0]
        return doubled, part.clone(), made.clone(), out.clone()

    same(vmap(func)(X), loop(func, 3)(X))

    def mixed(x: Tensor) -> Tensor:
        with torch.inference_mode():
            factor = x.cos()
        return (factor * x).sum()

    message = "Inference tensors cannot be saved for backward"
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(mixed)(X[0])
    with pytest.raises(RuntimeError, match=message):
        vmap(grad(mixed))(X)


# Threads


def on_a_thread(func: Function) -> Function:
    """Return the result of the function on a new thread."""

    def called(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(func, *args).result()

    return called


def test_threads_started_inside() -> None:
    def work(x: Tensor) -> Tensor:
        out = torch.zeros(4, dtype=x.dtype)
        out[1:] = layers(x)[1:]
        return out

    want = loop(work, 3)(X)
    same(vmap(on_a_thread(work))(X), want)
    total = grad(lambda x: vmap(on_a_thread(work))(x).square().sum())(X)
    same(total, torch.stack([torch.func.grad(lambda x: work(x).square().sum())(x) for x in X]))
    inside = vmap(grad(on_a_thread(scalar)))(X)
    same(inside, torch.stack([torch.func.grad(scalar)(x) for x in X]))
    pushed = loop(lambda x: torch.func.jvp(layers, (x,), (x,)), 3)(X)
    same(vmap(lambda x: jvp(on_a_thread(layers), (x,), (x,)))(X), pushed)

    def several(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(3) as pool:
            return torch.stack(list(pool.map(lambda k: layers(x * k), range(3))))

    same(vmap(several)(X), loop(several, 3)(X))


def test_transforms_on_threads_started_inside() -> None:
    def mapped(x: Tensor) -> tuple[Tensor, ...]:
        values = on_a_thread(lambda: vmap(lambda y: layers(x * y))(Y))()
        slopes = on_a_thread(lambda: vmap(grad(lambda y: scalar(x * y)))(Y))()
        return values, slopes, on_a_thread(grad(scalar))(x)

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        slopes = [torch.func.grad(lambda y: scalar(x * y))(y) for y in Y]
        return (
            torch.stack([layers(x * y) for y in Y]),
            torch.stack(slopes),
            torch.func.grad(scalar)(x),
        )

    same(vmap(mapped)(X), loop(plain, 3)(X))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: grad(f)(Y[0]),
        lambda f: vjp(f, Y[0])[1](torch.ones((), dtype=torch.float64)),
        lambda f: jvp(f, (Y[0],), (Y[1],)),
    ],
    ids=["grad", "vjp", "jvp"],
)
def test_a_derivative_that_does_not_see_the_values_of_another_thread(derivative: Function) -> None:
    """Nothing in its arguments shows the vmap, so captured values would go unrecorded."""

    def func(x: Tensor) -> Any:
        return on_a_thread(lambda: derivative(lambda y: scalar(x * y)))()

    with pytest.raises(RuntimeError, match=r"values of vmap\(func\), which was entered on another"):
        vmap(func)(X)


def test_threads_do_not_go_ever_deeper() -> None:
    """Each thread finds others active when it enters a level of its own."""
    depths: list[int] = []
    done = threading.Barrier(4)

    def noted(x: Tensor) -> Tensor:
        assert isinstance(x, tsfunc.Tracer)
        depths.append(x.dispatch_level.depth)
        return x + 1

    def run() -> None:
        for _ in range(30):
            vmap(noted)(X)
        done.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(depths) <= 17


# Hooks on what autograd saves


def with_hooks(func: Function) -> Function:
    """Hooks that transform saved values."""
    return under(lambda: saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2), func)


HOOKS: dict[str, Wrap] = {
    "computed": with_hooks,
    "in a tuple": lambda f: under(lambda: saved_tensors_hooks(lambda x: (x,), lambda x: x[0]), f),
    "save_on_cpu": lambda f: under(save_on_cpu, f),
    "checkpoint": lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False),
    "reentrant checkpoint": lambda f: lambda *args: checkpoint(f, *args, use_reentrant=True),
}

# Programs of a wrapped function have the results of the function itself.
PROGRAMS: dict[str, Callable[[Wrap], Any]] = {
    "grad": lambda w: grad(w(scalar))(X[0]),
    "vmap": lambda w: vmap(w(layers))(X),
    "vmap(grad)": lambda w: vmap(grad(lambda x: w(scalar)(x.cos())))(X),
    "grad(vmap)": lambda w: grad(lambda x: vmap(lambda x: w(scalar)(x.cos()))(x).sum())(X),
    "grad, around vmap": lambda w: grad(lambda x: w(vmap(layers))(x.cos()).sum())(X),
    "around vmap(grad)": lambda w: w(vmap(grad(scalar)))(X),
    "grad(grad)": lambda w: grad(lambda x: grad(w(scalar))(x.cos()).sin().sum())(X[0]),
    "vmap(grad(grad))": lambda w: vmap(grad(lambda x: grad(w(scalar))(x.cos()).sin().sum()))(X),
    "grad(vmap(grad))": lambda w: grad(lambda x: vmap(grad(w(scalar)))(x.cos()).sin().sum())(X),
    "grad(vmap), around grad": lambda w: grad(
        lambda x: vmap(w(lambda x: grad(scalar)(x.cos()).sin().sum()))(x).sum()
    )(X),
    "grad, around vmap(grad)": lambda w: grad(
        lambda x: w(lambda x: vmap(grad(scalar))(x).sin().sum())(x.cos())
    )(X),
    "vmap(grad(vmap(grad)))": lambda w: vmap(
        grad(lambda x: vmap(grad(lambda y: w(scalar)(x * y)))(Y).sin().sum())
    )(X),
    "vmap(jvp)": lambda w: vmap(lambda x: jvp(w(layers), (x,), (x.cos(),)))(X),
    "jvp(vmap(grad))": lambda w: jvp(lambda x: vmap(grad(w(scalar)))(x.cos()), (X,), (X,)),
    "vmap(jacrev)": lambda w: vmap(jacrev(w(layers)))(X),
    "in chunks": lambda w: grad(lambda x: vmap(w(scalar), chunk_size=2)(x).sum())(X),
    "a program": lambda w: tsfunc.specialize(vmap(grad(w(scalar))))(X),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # outside of grad
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_hooks_change_nothing(program: str, hooks: str) -> None:
    run = PROGRAMS[program]
    same(run(HOOKS[hooks]), run(lambda f: f))


@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_and_closed_over_parameters(hooks: str) -> None:
    weight = W.clone().requires_grad_()

    def gradient(wrap: Wrap) -> Any:
        def func(x: Tensor) -> Tensor:
            return wrap(lambda x: (x @ weight).sin().exp().sum())(x)

        return torch.autograd.grad(vmap(grad(func))(X).sin().sum() + vmap(func)(X).sum(), weight)

    same(gradient(HOOKS[hooks]), gradient(lambda f: f))


def test_hooks_are_called() -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x * 1

    hooked = under(lambda: saved_tensors_hooks(pack, lambda x: x), scalar)
    grad(lambda x: vmap(hooked)(x).sum())(X)
    assert packed and all(type(x) is Tensor for x in packed)
    packed.clear()
    vmap(grad(hooked))(X)
    assert any(isinstance(x, tsfunc.Tracer) for x in packed)


def test_hooks_that_are_switched_off() -> None:
    off = under(lambda: disable_saved_tensors_hooks("no hooks here"), vmap(grad(scalar)))
    same(off(X), vmap(grad(scalar))(X))
    inside = under(lambda: disable_saved_tensors_hooks("no hooks here"), with_hooks(scalar))
    with pytest.raises(RuntimeError, match="no hooks here"):
        grad(inside)(X[0])
    with pytest.raises(RuntimeError, match="no hooks here"):
        vmap(grad(inside))(X)


# Checkpoints

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


@REENTRANT
def test_a_checkpoint_runs_its_function_again(reentrant: bool) -> None:
    runs: list[int] = []

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return layers(x).exp()

    def func(x: Tensor) -> Tensor:
        return checkpoint(counted, x, use_reentrant=reentrant).sum()

    for derivative in (vmap(grad(func)), grad(lambda x: vmap(func)(x).sum())):
        runs.clear()
        same(derivative(X), torch.stack([torch.func.grad(scalar)(x) for x in X]))
        assert len(runs) == 2
    runs.clear()
    same(vmap(func)(X), loop(scalar, 3)(X))
    assert len(runs) == 1


@REENTRANT
@pytest.mark.parametrize("randomness", ["same", "different", "split"])
@pytest.mark.parametrize(
    "draw",
    [nnf.dropout, lambda x: x * (torch.rand(4) > 0.5), lambda x: x * torch.rand_like(x)],
    ids=["dropout", "rand", "rand_like"],
)
def test_a_second_run_draws_the_same_numbers(
    draw: Callable[[Tensor], Tensor], randomness: str, reentrant: bool
) -> None:
    x = X.abs() + 1

    def func(x: Tensor) -> tuple[Tensor, Tensor]:
        y = checkpoint(lambda x: draw(x).exp(), x.sin(), use_reentrant=reentrant)
        return y.sum(), y

    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        sums, y = vmap(func, randomness=randomness)(x)
        return sums.sum(), y

    each = vmap(grad(func, has_aux=True), randomness=randomness)
    for derivative in (each, grad(total, has_aux=True)):
        slope, y = derivative(x)
        # y = exp(m sin x), so the drawn value is m = log y / sin x, in both runs.
        same(slope, y * y.log() / x.sin() * x.cos())


@REENTRANT
def test_checkpoints_in_checkpoints_and_sequences(reentrant: bool) -> None:
    def inner(x: Tensor) -> Tensor:
        return 2 * checkpoint(layers, x, use_reentrant=reentrant)

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x.cos(), use_reentrant=reentrant).sum()

    want = torch.stack([torch.func.grad(lambda x: 2 * layers(x.cos()).sum())(x) for x in X])
    same(grad(outer)(X[0]), want[0])
    same(vmap(grad(outer))(X), want)
    same(grad(lambda x: vmap(outer)(x).sum())(X), want)

    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).double()
    params = list(model.parameters())

    def in_parts(x: Tensor) -> Tensor:
        return checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum()

    same(
        torch.autograd.grad(vmap(in_parts)(X).sum(), params),
        torch.autograd.grad(model(X).sum(), params),
    )


def test_transforms_and_writes_in_a_second_run() -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.zeros(3, dtype=x.dtype)
        out[0] = x[0].sin()
        out[1:] = x[1:3] ** 2
        values = vmap(lambda y: (out.sum() * y).sin().sum())(Y)
        return torch.add(values.sum(), grad(scalar)(x).sum())

    def func(x: Tensor) -> Tensor:
        return checkpoint(body, x, use_reentrant=False)

    same(grad(lambda x: vmap(func)(x).sum())(X), grad(lambda x: vmap(body)(x).sum())(X))
    same(vmap(grad(func))(X), vmap(grad(body))(X))


def test_values_have_escaped_again_after_a_second_run() -> None:
    kept: list[Tensor] = []

    def func(x: Tensor) -> Tensor:
        kept.append(x)
        return checkpoint(scalar, x, use_reentrant=False)

    grad(lambda x: vmap(func)(x).sum())(X)
    with pytest.raises(EscapedTracerError):
        kept[0] + 1

    def fails_later(x: Tensor) -> Tensor:
        if len(kept) > 1:
            raise ValueError("the second run")
        kept.append(x)
        return scalar(x)

    with pytest.raises(ValueError, match="the second run"):
        grad(lambda x: vmap(lambda x: checkpoint(fails_later, x, use_reentrant=False))(x).sum())(X)
    with pytest.raises(EscapedTracerError):
        kept[1] + 1


# Anomaly mode


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode() -> None:
    def anomaly() -> torch.autograd.detect_anomaly:
        return torch.autograd.detect_anomaly(check_nan=True)

    want = torch.stack([torch.func.grad(scalar)(x) for x in X])
    same(under(anomaly, vmap(grad(scalar)))(X), want)
    same(vmap(grad(under(anomaly, scalar)))(X), want)
    same(under(anomaly, grad(lambda x: vmap(scalar)(x).sum()))(X), want)
    same(under(anomaly, vmap(hessian(scalar)))(X), vmap(hessian(scalar))(X))
    pushed = vmap(lambda x: jvp(layers, (x,), (x,)))
    same(under(anomaly, pushed)(X), pushed(X))


def unrecorded(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(p: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return f(p, v)

    return run


def of_both(p: Tensor, v: Tensor) -> Tensor:
    return (p * v).sin().sum() + (p * p).sum()


Derivative = Callable[[Any], Callable[[Tensor, Tensor], Tensor]]
DERIVATIVES: dict[str, Derivative] = {
    "grad": lambda T: lambda p, v: T.grad(of_both)(p, v),
    "vjp": lambda T: lambda p, v: T.vjp(lambda p: p.sin() * v, p)[1](v)[0],
    "jvp": lambda T: lambda p, v: T.jvp(lambda p: (p * v).sin(), (p,), (v,))[1],
    "jvp(grad)": lambda T: lambda p, v: T.jvp(lambda p: T.grad(of_both)(p, v), (p,), (v,))[1],
    "grad(jvp)": lambda T: (
        lambda p, v: T.grad(lambda p: T.jvp(lambda p: of_both(p, v), (p,), (v,))[1])(p)
    ),
    "grad(grad)": lambda T: lambda p, v: T.grad(lambda p: T.grad(of_both)(p, v).sin().sum())(p),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_derivatives_without_grad_mode_are_constants(name: str, mapped: bool, traced: bool) -> None:
    """The function turns grad mode off: neither ``backward`` nor outer transforms see it."""
    p, v = torch.tensor([0.3, -0.7, 1.1]), torch.randn(4, 3)

    def whole(T: Any) -> Callable[[Tensor], Tensor]:
        each = unrecorded(DERIVATIVES[name](T))
        if mapped:
            return lambda p: T.vmap(each, (None, 0))(p, v)
        return lambda p: torch.stack([each(p, row) for row in v])

    ours = tsfunc.specialize(whole(tsfunc)) if traced else whole(tsfunc)
    got = ours(p.clone().requires_grad_())
    assert not got.requires_grad
    torch.testing.assert_close(got, whole(torch.func)(p))
    outer = tsfunc.grad(lambda p: whole(tsfunc)(p).sum() + p.sum())
    assert (tsfunc.specialize(outer) if traced else outer)(p).equal(torch.ones(3))
