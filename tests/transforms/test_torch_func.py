"""Combinations with torch.func: its transforms inside of ours, and ours inside of its."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func as theirs
from torch import Tensor

import tsfunc as ours
from tests.transforms.support import leaves, same
from tsfunc.errors import DataDependentError

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()
LINEAR = torch.nn.Linear(4, 2)


def scalar(x: Tensor) -> Tensor:
    return (x.sin() ** 2).sum()


# Each is a nesting of an outer and an inner transform, of either library.
NESTINGS: dict[str, Callable[[Any, Any], Any]] = {
    "vmap(vmap)": lambda a, b: a.vmap(b.vmap(torch.sin))(X),
    "vmap(grad)": lambda a, b: a.vmap(b.grad(scalar))(X),
    "vmap(jvp)": lambda a, b: a.vmap(lambda x: b.jvp(torch.sin, (x,), (x,))[1])(X),
    "vmap(vjp)": lambda a, b: a.vmap(lambda x: b.vjp(torch.sin, x)[1](x)[0])(X),
    "vmap(jacrev)": lambda a, b: a.vmap(b.jacrev(torch.sin))(X),
    "vmap(jacfwd)": lambda a, b: a.vmap(b.jacfwd(torch.sin))(X),
    "vmap(hessian)": lambda a, b: a.vmap(b.hessian(scalar))(X),
    "vmap(vmap(hessian))": lambda a, b: a.vmap(a.vmap(b.hessian(scalar)))(X[None]),
    "grad(grad)": lambda a, b: a.grad(lambda x: b.grad(scalar)(x).sum())(X),
    "grad(vmap)": lambda a, b: a.grad(lambda x: b.vmap(scalar)(x).sum())(X),
    "grad(hessian)": lambda a, b: a.grad(lambda x: b.hessian(scalar)(x).sum())(W),
    "grad(vmap(grad))": lambda a, b: a.grad(lambda x: b.vmap(b.grad(scalar))(x).sum())(X),
    "grad(vmap), grad of the other": lambda a, b: a.grad(lambda x: a.vmap(b.grad(scalar))(x).sum())(
        X
    ),
    "jvp(grad)": lambda a, b: a.jvp(b.grad(scalar), (X,), (X,)),
    "jvp(vmap)": lambda a, b: a.jvp(b.vmap(scalar), (X,), (X,)),
    "jacrev(jacrev)": lambda a, b: a.jacrev(b.jacrev(torch.sin))(W),
    "jacfwd(jacrev)": lambda a, b: a.jacfwd(b.jacrev(torch.sin))(W),
    "jacrev(vmap)": lambda a, b: a.jacrev(b.vmap(torch.sin))(X),
    "hessian(vmap)": lambda a, b: a.hessian(lambda x: b.vmap(scalar)(x).sum())(X),
    "vmap(grad(vmap))": lambda a, b: a.vmap(b.grad(lambda x: a.vmap(torch.sin)(x).sum()))(X),
    "vmap(grad), vmap of the other": lambda a, b: a.vmap(
        a.grad(lambda x: b.vmap(torch.sin)(x).sum())
    )(X),
    "vmap(jvp), vmap of the other": lambda a, b: a.vmap(
        lambda x: a.jvp(b.vmap(torch.sin), (x,), (x,))[1]
    )(X),
    "vmap over a value closed over": lambda a, b: a.vmap(
        lambda x: b.vmap(lambda y: (x * y).sum())(X)
    )(X),
    "grad over a value closed over": lambda a, b: a.vmap(
        lambda x: b.grad(lambda y: (x * y * y).sum())(W)
    )(X),
    "grad_and_value": lambda a, b: a.vmap(b.grad_and_value(scalar))(X),
    "functional_call": lambda a, b: a.vmap(
        lambda x: b.functional_call(LINEAR, dict(LINEAR.named_parameters()), (x,))
    )(X),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_ours_outside(name: str) -> None:
    same(NESTINGS[name](ours, theirs), NESTINGS[name](theirs, theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NESTINGS)
def test_theirs_outside(name: str) -> None:
    same(NESTINGS[name](theirs, ours), NESTINGS[name](theirs, theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ours.jvp(lambda x: theirs.jvp(torch.sin, (x,), (x,))[1], (X,), (X,)),
        lambda: ours.jacfwd(theirs.jacfwd(torch.sin))(W),
    ],
    ids=["jvp", "jacfwd"],
)
def test_forward_mode_of_both_is_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"tsfunc.jvp: .*torch.func.jvp.* Use tsfunc.jvp"):
        build()


def test_nothing_is_left_behind() -> None:
    for _ in range(2):
        same(theirs.vmap(ours.grad(scalar))(X), theirs.vmap(theirs.grad(scalar))(X))
        same(ours.vmap(theirs.grad(scalar))(X), theirs.vmap(theirs.grad(scalar))(X))
    assert torch._C._functorch.maybe_current_level() is None


def test_functionalize() -> None:
    same(ours.vmap(theirs.functionalize(lambda x: x.clone().add_(1)))(X), X + 1)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize_over_ours() -> None:
    out, push = theirs.linearize(ours.vmap(torch.sin), X)
    same((out, push(X)), (X.sin(), X.cos() * X))


def along_itself(x: Tensor) -> Any:
    """Return the derivative by jvp; linearize inside of torch.func has its derivatives, too."""
    return theirs.jvp(lambda x: (x.sin() * x).sum(), (x,), (x,))[1] + (x * 2).sum()


def pushed(x: Tensor) -> Any:
    out, push, aux = ours.linearize(lambda x: ((x.sin() * x).sum(), x * 2), x, has_aux=True)
    return push(x) + aux.sum() + out - (x.sin() * x).sum()


OVER_LINEARIZE: dict[str, Callable[[Callable[[Tensor], Any]], Any]] = {
    "grad": lambda f: theirs.grad(f)(X[0]),
    "hessian": lambda f: theirs.hessian(f)(X[0]),
    "vmap": lambda f: theirs.vmap(f)(X),
    "vmap(grad)": lambda f: theirs.vmap(theirs.grad(f), 1)(X),
    "jvp": lambda f: theirs.jvp(f, (X[0],), (X[1],)),
}


@pytest.mark.parametrize("over", OVER_LINEARIZE.values(), ids=OVER_LINEARIZE)
def test_derivatives_of_linearize(over: Callable[[Callable[[Tensor], Any]], Any]) -> None:
    """torch.func's own linearize returns zeros or uninitialized numbers there."""
    same(over(pushed), over(along_itself))


INSIDE: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: theirs.vmap(lambda a, b: a * b + W)(x, x * 2),
    "vmap of what is closed over": lambda x: theirs.vmap(lambda row: row @ W + x.sum())(x),
    "grad": theirs.grad(lambda x: (x.sin() * W).sum()),
    "vmap(grad)": theirs.vmap(theirs.grad(lambda x: (x.sin() * W).sum())),
    "vjp": lambda x: theirs.vjp(lambda x: (x.sin() * W).sum(0), x)[1](x[0]),
    "jvp": lambda x: theirs.jvp(lambda x: (x.sin() * W).sum(), (x,), (x,)),
    "jacrev": theirs.jacrev(lambda x: (x.sin() * W).sum(0)),
    "hessian": lambda x: theirs.hessian(lambda x: (x.sin() * W).sum())(x[0]),
}


@pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
def test_a_program_is_traced_through_torch_func(f: Callable[[Tensor], Any]) -> None:
    """Tensors that torch.func wraps inside of a trace are not constants from outside."""
    program = ours.specialize(f)
    for x in (X, X + 1):
        torch.testing.assert_close(program(x), f(x))
    assert program.cache_info().programs == 1
    both = torch.stack([X, X * 2])
    torch.testing.assert_close(ours.vmap(program)(both), ours.vmap(f)(both))


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "operators": lambda x: x.sin() * x,
    "a loop": lambda x: ours.while_loop(lambda c: c.sum() < 10, lambda c: c * 2 + 1, x),
    "a scan": lambda x: ours.scan(lambda c, a: (c * a, c), x.sum(), x),
    "a choice": lambda x: ours.cond(x.sum() > 0, torch.sin, torch.cos, x),
}


def total(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: sum(part.sum() for part in leaves(f(x)))


@pytest.mark.parametrize("known", [False, True], ids=["traced inside", "traced before"])
@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
def test_torch_func_differentiates_programs(f: Callable[[Tensor], Any], known: bool) -> None:
    """A program is made outside of torch.func's transforms, as it is outside of ours."""
    program = ours.specialize(f)
    if known:
        program(W)
    for made in (theirs.grad, theirs.jacfwd, theirs.hessian):
        same(made(total(program))(W), made(total(f))(W))
    same(theirs.vjp(program, W)[0], f(W))


@pytest.mark.parametrize("run", [lambda f: f, ours.specialize], ids=["eager", "a program"])
@pytest.mark.parametrize(
    ("f", "what"), [(PROGRAMS["a loop"], "while_loop"), (PROGRAMS["a choice"], "cond")]
)
def test_torch_func_does_not_split_examples(run: Any, f: Any, what: str) -> None:
    match = f"{what}: the choice differs from example to example of torch.func.vmap.* Use tsfunc"
    for transform in (lambda f: f, theirs.grad):
        with pytest.raises(DataDependentError, match=match):
            theirs.vmap(transform(total(run(f))))(X)
    assert torch._C._functorch.maybe_current_level() is None


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: torch.vmap(torch.sin)(w) + x.sum(),
        lambda x, w: torch.vmap(lambda row: row * 2 + x.sum())(w),
        lambda x, w: torch.vmap(lambda row: torch.addmm(row, x, torch.ones(3, 3)))(w),
        lambda x, w: torch.func.grad(lambda row: (row @ w.T).sum())(x),
        lambda x, w: torch.func.jvp(lambda row: (row * w[0]).sum(), (x,), (x,))[1],
    ],
    ids=["of itself", "by a number", "beside a factory", "in a derivative", "in a tangent"],
)
def test_tensors_from_outside_in_programs(f: Any) -> None:
    """A program reads the tensors that torch.func's vmap maps over anew in every call."""
    x, w = torch.randn(4, 3), torch.randn(5, 3)
    g = ours.specialize(lambda x: f(x, w))
    for _ in range(2):
        torch.testing.assert_close(g(x), f(x, w))
        w.add_(1)
