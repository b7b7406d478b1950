"""Outputs of derivatives that depend only on tensors that an outer transform differentiates by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsfunc

VJP: Any = tsfunc.vjp
GRAD: Any = tsfunc.grad

X = torch.tensor([0.3, -0.7], dtype=torch.float64)
Y = torch.tensor([1.1, 0.2, -0.4], dtype=torch.float64)

# Each returns a value that a derivative by y passes through: it does not depend on y.
PASSED: dict[str, Callable[[Any], Any]] = {
    "vjp": lambda given: VJP(lambda y: given, Y)[0],
    "vjp, aux": lambda given: VJP(lambda y: (y * 2, given), Y, has_aux=True)[2],
    "jvp": lambda given: tsfunc.jvp(lambda y: given, (Y,), (Y,))[0],
    "jvp, aux": lambda given: tsfunc.jvp(lambda y: (y * 2, given), (Y,), (Y,), has_aux=True)[2],
    "linearize": lambda given: tsfunc.linearize(lambda y: given, Y)[0],
    "linearize, aux": lambda given: tsfunc.linearize(lambda y: (y, given), Y, has_aux=True)[2],
    "grad, aux": lambda given: GRAD(lambda y: (y.sum(), given), has_aux=True)(Y)[1],
    "grad_and_value": lambda given: tsfunc.grad_and_value(lambda y: given.sum())(Y)[1],
    "value_and_grad, aux": (
        lambda given: tsfunc.value_and_grad(lambda y: (y.sum(), given), has_aux=True)(Y)[0][1]
    ),
    "jacrev, aux": lambda given: tsfunc.jacrev(lambda y: (y, given), has_aux=True)(Y)[1],
    "jacfwd, aux": lambda given: tsfunc.jacfwd(lambda y: (y, given), has_aux=True)(Y)[1],
}
GIVEN = {"the tensor": lambda x: x, "computed from it": lambda x: x.sin() * 3}


def directly(function: Any, x: torch.Tensor) -> Any:
    return function(x)


def under_vmap(function: Any, x: torch.Tensor) -> Any:
    """Call the function for each of two examples, which capture ``x``."""
    return tsfunc.vmap(lambda factor: function(x) * factor)(torch.ones(2, dtype=x.dtype)).sum(0) / 2


def under_vmap_of_it(function: Any, x: torch.Tensor) -> Any:
    return tsfunc.vmap(function)(torch.stack([x, x]))[0]


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: tsfunc.grad(f)(X),
    "specialize(grad)": lambda f: tsfunc.specialize(tsfunc.grad(f))(X),
    "jvp": lambda f: tsfunc.jvp(f, (X,), (torch.ones_like(X),))[1],
    "hessian": lambda f: tsfunc.hessian(f)(X),
    "autograd": lambda f: torch.autograd.grad(f(x := X.clone().requires_grad_()), x)[0],
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("called", [directly, under_vmap, under_vmap_of_it])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("passed", PASSED)
def test_what_a_derivative_passes_through_keeps_its_outer_derivatives(
    passed: str, given: str, called: Any, derivative: str
) -> None:
    def total(x: torch.Tensor) -> Any:
        return called(lambda v: PASSED[passed](GIVEN[given](v)), x).square().sum()

    def expected(x: torch.Tensor) -> Any:
        value = GIVEN[given](x)
        return (value.sum() if passed == "grad_and_value" else value).square().sum()

    found = DERIVATIVES[derivative](total)
    torch.testing.assert_close(found, DERIVATIVES[derivative](expected))


def test_outputs_without_outer_derivatives_are_constants() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not VJP(lambda y: x * 2, Y)[0].requires_grad
        assert not GRAD(lambda y: (y.sum(), x * 2), has_aux=True)(Y)[1].requires_grad
    assert not VJP(lambda y: y * 2, Y)[0].requires_grad
    assert not GRAD(lambda y: (y.sum(), y * 2), has_aux=True)(Y)[1].requires_grad


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("mapped", [False, True])
def test_jvp_of_jacrev_in_chunks(chunk_size: int | None, mapped: bool) -> None:
    def jacobian(x: torch.Tensor) -> Any:
        return tsfunc.jacrev(torch.sin, chunk_size=chunk_size)(x)

    function = tsfunc.vmap(jacobian) if mapped else jacobian
    x = torch.stack([X, X + 1]) if mapped else X
    tangent = tsfunc.jvp(function, (x,), (x.cos(),))[1]
    torch.testing.assert_close(tangent, torch.diag_embed(-x.sin() * x.cos()))


XS = torch.stack([X, X.cos(), X * 3])

# Each maps a pullback over cotangents, or a pushforward over tangents, that depend on ``t`` and on
# the mapped ``k``; some differentiate by one of these outside or inside of the vmap.
MAPPED: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "vmap": lambda lib, p, t: lib.vmap(lambda k: p(k * t))(Y).sin(),
    "grad of vmap": lambda lib, p, t: lib.grad(
        lambda t: lib.vmap(lambda k: p(t * k))(Y).sin().sum()
    )(t),
    "grad of two vmaps": lambda lib, p, t: lib.grad(
        lambda t: lib.vmap(lib.vmap(lambda k: p(t * k)))(Y[None]).sin().sum()
    )(t),
    "jacrev of vmap": lambda lib, p, t: lib.jacrev(lambda t: lib.vmap(lambda k: p(t * k))(Y))(t),
    "hessian of vmap": lambda lib, p, t: lib.hessian(
        lambda t: lib.vmap(lambda k: p(t * k).sin().sum())(Y).sum()
    )(t),
    "vmap of grad": lambda lib, p, t: lib.vmap(lib.grad(lambda k: p(t * k).sin().sum()))(Y),
    "vmap of grad by t": lambda lib, p, t: lib.vmap(
        lambda k: lib.grad(lambda t: p(t * k).sin().sum())(t)
    )(Y),
}
AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda lib, f: f(X, X.exp()),
    "vmap": lambda lib, f: lib.vmap(f)(XS, XS.exp()),
    "grad": lambda lib, f: lib.grad(lambda v, t: f(v, t).sin().sum(), (0, 1))(X, X.exp()),
    "vmap of grad": lambda lib, f: lib.vmap(
        lib.grad(lambda v, t: f(v, t).sin().sum(), argnums=(0, 1))
    )(XS, XS.exp()),
    "grad of vmap": lambda lib, f: lib.grad(
        lambda v, t: lib.vmap(f)(v, t).sin().sum(), argnums=(0, 1)
    )(XS, XS.exp()),
}
LINEAR: dict[str, Callable[[Any], Any]] = {
    "pullback": lambda v: lambda ct: VJP(lambda v: v.sin() * 2, v)[1](ct)[0],
    "pullback made once": lambda v: (lambda pull: lambda ct: pull(ct)[0])(
        VJP(lambda v: v.sin() * 2, v)[1]
    ),
    "pushforward": lambda v: tsfunc.linearize(lambda v: v.sin() * 2, v)[1],
}


@pytest.mark.parametrize("wrap", [lambda f: f, tsfunc.specialize], ids=["plain", "specialize"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("linear", LINEAR)
def test_a_linear_map_keeps_the_derivatives_of_the_mapped_vectors_that_it_takes(
    linear: str, mapped: str, around: str, wrap: Any
) -> None:
    program = wrap(lambda v, t: MAPPED[mapped](tsfunc, LINEAR[linear](v), t))
    expected = AROUND[around](
        torch.func,
        lambda v, t: MAPPED[mapped](torch.func, lambda ct: v.cos() * 2 * ct, t),
    )
    torch.testing.assert_close(AROUND[around](tsfunc, program), expected)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t * 1,
    "expanded": lambda t: t[:1].expand(3, 2),
    "select": lambda t: torch.stack([t, t])[1],
}


@pytest.mark.parametrize("around", ["jvp", "grad", "vmap of jvp", "vmap of grad"])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("primal", LAYOUTS)
def test_tangents_of_another_layout_than_their_primals_keep_their_outer_dependence(
    primal: str, first: str, second: str, around: str
) -> None:
    laid, dv, du = LAYOUTS[primal], LAYOUTS[first], LAYOUTS[second]

    def twice(v: torch.Tensor, t: torch.Tensor) -> Any:
        push = lambda v: tsfunc.jvp(torch.sin, (laid(v),), (dv(t),))[1]  # noqa: E731
        return tsfunc.jvp(push, (v,), (du(t),))[1]

    def expected(v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return -laid(v).sin() * dv(t) * laid(du(t))

    def derivative(lib: Any, f: Any) -> Any:
        def at(v: torch.Tensor, t: torch.Tensor) -> Any:
            if "jvp" in around:
                return lib.jvp(f, (v, t), (t.cos(), v.cos()))
            return lib.grad(lambda v, t: f(v, t).cos().sum(), argnums=(0, 1))(v, t)

        v, t = XS, XS.exp()
        if "vmap" in around:
            return lib.vmap(at)(torch.stack([v, t]), torch.stack([t.sin(), v]))
        return at(v, t)

    torch.testing.assert_close(derivative(tsfunc, twice), derivative(torch.func, expected))
