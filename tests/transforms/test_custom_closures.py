"""Captured values of rules, and arguments without derivatives: right, or an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.transforms.support import same
from tsfunc import (
    cond,
    custom_jvp,
    custom_vjp,
    custom_vmap,
    errors,
    functional_call,
    grad,
    jvp,
    specialize,
    stop_gradient,
    vjp,
    vmap,
)
from tsfunc.transforms.closure_convert import consts_of
from tsfunc.transforms.custom_derivatives import closure_convert, custom_gradient

X = torch.linspace(-1, 2, 4, dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)


def slope_by_vjp(y: Tensor) -> Any:
    """Return a gradient that is 2 cos(y) by a pullback that captures y."""
    f = custom_vjp(lambda x: 2 * x.sin())
    f.defvjp(lambda x: (f(x), ()), lambda _, ct: (2 * y.cos() * ct,))
    return grad(f)(ONE)


def slope_by_residual(y: Tensor) -> Any:
    f = custom_vjp(lambda x: 2 * x.sin())
    f.defvjp(lambda x: (f(x), y), lambda y, ct: (2 * y.cos() * ct,))
    return grad(f)(ONE)


def slope_by_jvp(y: Tensor) -> Any:
    f = custom_jvp(lambda x: 2 * x.sin())
    f.defjvp(lambda primals, tangents: (f(*primals), 2 * y.cos() * tangents[0]))
    return grad(f)(ONE)


class Scaled:
    """A rule that reads an attribute of its object."""

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def bwd(self, _: Any, ct: Tensor) -> Any:
        return (2 * self.y.cos() * ct,)


def slope_by_method(y: Tensor) -> Any:
    f = custom_vjp(lambda x: 2 * x.sin())
    f.defvjp(lambda x: (f(x), ()), Scaled(y).bwd)
    return grad(f)(ONE)


def slope_by_partial(y: Tensor) -> Any:
    def bwd(y: Tensor, _: Any, ct: Tensor) -> Any:
        return (2 * y.cos() * ct,)

    f = custom_vjp(lambda x: 2 * x.sin())
    f.defvjp(lambda x: (f(x), ()), functools.partial(bwd, y))
    return grad(f)(ONE)


def _pushed(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]


TRANSFORMS: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "plain": lambda f: f,
    "grad": grad,
    "jvp": _pushed,
    "grad(grad)": lambda f: grad(grad(f)),
    "grad(jvp)": lambda f: grad(_pushed(f)),
    "specialize": specialize,
    "grad(specialize)": lambda f: grad(specialize(f)),
    "specialize(grad)": lambda f: specialize(grad(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "f", [slope_by_vjp, slope_by_residual, slope_by_jvp, slope_by_method, slope_by_partial]
)
def test_gradients_depend_on_tensors_closed_over_by_rules(f: Any, transform: str) -> None:
    one = TRANSFORMS[transform](f)
    plain = transform.replace("specialize", "plain")
    plain = {"grad(plain)": "grad", "plain(grad)": "grad"}.get(plain, plain)
    expected = torch.stack([TRANSFORMS[plain](lambda y: 2 * y.cos())(x) for x in X])
    torch.testing.assert_close(torch.stack([one(x) for x in X]), expected)
    torch.testing.assert_close(vmap(one)(X), expected)
    torch.testing.assert_close(specialize(vmap(one))(X), expected)


@pytest.mark.parametrize("f", [slope_by_vjp, slope_by_jvp])
def test_gradients_through_vmap_depend_on_tensors_closed_over_by_rules(f: Any) -> None:
    found = grad(lambda x: vmap(f)(x).sum())(X)
    torch.testing.assert_close(found, -2 * X.sin())
    torch.testing.assert_close(_pushed(vmap(f))(X), -2 * X.sin())
    leaf = X.clone().requires_grad_()
    vmap(f)(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, -2 * X.sin())


def with_vjp(x: Tensor) -> Any:
    f = custom_vjp(lambda y: x * y)
    f.defvjp(lambda y: (f(y), y), lambda y, ct: (y.cos() * ct,))
    return f


def with_jvp(x: Tensor) -> Any:
    f = custom_jvp(lambda y: x * y)
    f.defjvp(lambda primals, tangents: (f(*primals), primals[0].cos() * tangents[0]))
    return f


@pytest.mark.parametrize("rule", [with_vjp, with_jvp])
def test_a_result_can_not_be_differentiated_by_a_closed_over_tensor(
    rule: Any,
) -> None:
    def f(x: Tensor) -> Any:
        return rule(x)(x)

    match = r"custom_v?j?v?p: the result of <lambda> depends on .* Pass it as an argument"
    calls: list[Callable[[], Any]] = [
        lambda: grad(f)(ONE),
        lambda: grad(lambda x: rule(x)(ONE))(ONE),
        lambda: jvp(f, (ONE,), (ONE,)),
        lambda: vmap(grad(f))(X),
        lambda: grad(lambda x: vmap(f)(x).sum())(X),
        lambda: specialize(grad(f))(ONE),
        lambda: grad(specialize(f))(ONE),
    ]
    for call in calls:
        with pytest.raises(errors.UndefinedDerivativeError, match=match):
            call()
    # Derivatives by other arguments work, and where the value is detached.
    assert grad(lambda y: rule(ONE)(y))(ONE) == ONE.cos()
    assert grad(lambda x: rule(stop_gradient(x))(x))(ONE) == ONE.cos()
    torch.testing.assert_close(grad(lambda y: vmap(lambda x: rule(x)(y))(X).sum())(ONE),
                               4 * ONE.cos())  # fmt: skip
    torch.testing.assert_close(vmap(lambda x: rule(x)(ONE))(X), X)


def test_parameters_that_no_transform_differentiates_by() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    f = with_vjp(weight)
    f(ONE).backward()  # the function's own derivative needs no rule
    assert weight.grad == 1
    assert grad(f)(ONE) == ONE.cos()
    with pytest.raises(errors.UndefinedDerivativeError):
        f(ONE.clone().requires_grad_()).backward()


@pytest.mark.parametrize("kind", [custom_vjp, custom_jvp])
def test_arguments_that_are_not_differentiated_by_may_be_batched_or_traced(kind: Any) -> None:
    f = kind(lambda x, y: x * y, nondiff_argnums=(0,))
    if kind is custom_vjp:
        f.defvjp(lambda x, y: (f(x, y), y), lambda x, y, ct: (x * y.cos() * ct,))
    else:
        f.defjvp(lambda x, p, t: (f(x, *p), x * p[0].cos() * t[0]))
    y = X.cos()
    expected = X * y.cos()
    calls: list[Any] = [
        vmap(grad(f, 1)),
        grad(lambda x, y: vmap(f)(x, y).sum(), 1),
        specialize(vmap(grad(f, 1))),
        vmap(specialize(grad(f, 1))),
        lambda x, y: jvp(lambda y: vmap(f)(x, y), (y,), (torch.ones_like(y),))[1],
    ]
    for call in calls:
        torch.testing.assert_close(call(X, y), expected)
    wrongs: list[Callable[[], Any]] = [
        lambda: grad(f)(ONE, ONE),
        lambda: jvp(lambda x: f(x, ONE), (ONE,), (ONE,)),
    ]
    for wrong in wrongs:
        with pytest.raises(errors.UndefinedDerivativeError, match="nondiff_argnums"):
            wrong()


def test_rules_that_call_their_own_function() -> None:
    """A linear function whose rule is the function, on the tangent; and a fwd that calls it."""
    negated = custom_jvp(lambda x: -x)
    negated.defjvp(lambda p, t: (negated(*p), negated(*t)))
    solved = custom_jvp(lambda a, x: a @ x)
    solved.defjvp(lambda p, t: (solved(*p), solved(p[0], t[1]) + solved(t[0], p[1])))
    for transform in (lambda f: f, specialize, lambda f: lambda x: vmap(f)(x[None])[0]):
        assert transform(grad(negated))(ONE) == -1
        assert transform(grad(lambda x: negated(x) * negated(x)))(ONE) == 2
        a = torch.rand(3, 3, dtype=torch.float64)
        for by in (0, 1):
            found = transform(lambda a, by=by: grad(lambda a, x: solved(a, x).sum(), by)(a, a[0]))(
                a
            )
            expected = grad(lambda a, x: (a @ x).sum(), by)(a, a[0])
            torch.testing.assert_close(found, expected)
    hess = jvp(grad(lambda a: solved(a, a[0]).sin().sum()), (a,), (a,))[1]
    torch.testing.assert_close(hess, jvp(grad(lambda a: (a @ a[0]).sin().sum()), (a,), (a,))[1])


def test_a_result_that_is_the_same_for_all_examples_has_the_derivative_of_the_rule() -> None:
    f = custom_vjp(lambda x: torch.zeros(()))
    f.defvjp(lambda x: (torch.zeros(()), None), lambda _, ct: (ct,))
    x = torch.rand(3)
    for found in (
        vmap(grad(f))(x),
        grad(lambda x: vmap(f)(x).sum())(x),
        specialize(grad(lambda x: vmap(f)(x).sum()))(x),
        jvp(vmap(f), (x,), (torch.ones(3),))[1],
    ):
        assert found.tolist() == [1.0] * 3


def test_closure_convert_makes_arguments_of_closed_over_tensors() -> None:
    def doubled_slope(f: Any, x: Tensor) -> Any:
        """Return a function with derivatives by captured values, with twice its derivatives."""
        converted, closed = closure_convert(f, x)
        value = custom_vjp(lambda x, *closed: converted(x, *closed))

        def fwd(x: Tensor, *closed: Any) -> Any:
            return converted(x, *closed), (x, closed)

        def bwd(saved: Any, ct: Any) -> Any:
            x, closed = saved
            return tuple(
                2 * ct * g for g in grad(converted, tuple(range(1 + len(closed))))(x, *closed)
            )

        value.defvjp(fwd, bwd)
        return value(x, *closed)

    def g(scale: Tensor, x: Tensor) -> Any:
        return doubled_slope(lambda x: (scale * x).sin(), x)

    expected = [2 * d for d in grad(lambda s, x: (s * x).sin(), (0, 1))(ONE, ONE)]
    torch.testing.assert_close([*grad(g, (0, 1))(ONE, ONE)], expected)
    torch.testing.assert_close([*specialize(grad(g, (0, 1)))(ONE, ONE)], expected)
    many = vmap(grad(g, (0, 1)))(X, X)
    torch.testing.assert_close(
        [*many], [2 * d for d in vmap(grad(lambda s, x: (s * x).sin(), (0, 1)))(X, X)]
    )
    converted, closed = closure_convert(lambda x: x, ONE)
    assert closed == [] and converted(ONE) == 1
    with pytest.raises(
        TypeError, match="closure_convert: the function made of <lambda>: expected arguments"
    ):
        converted(ONE, ONE)


def test_custom_gradient() -> None:
    one = custom_gradient(lambda x: (x**2, lambda ct: ct * x))
    two = custom_gradient(lambda x, y: (x * y, lambda ct: (y * ct, 3 * x * ct)))
    batched: Any = lambda f: lambda *args: vmap(f)(*[x[None] for x in args])[0]  # noqa: E731
    for transform in (lambda f: f, specialize, batched):
        assert transform(one)(2 * ONE) == 4
        assert transform(grad(one))(2 * ONE) == 2
        assert transform(grad(grad(one)))(2 * ONE) == 1
        assert transform(grad(two, 1))(2 * ONE, ONE) == 6
    with pytest.raises(errors.CustomRuleError, match="expected a pair, its result and a func"):
        custom_gradient(lambda x: x)(ONE)


def test_rules_see_the_examples_that_take_a_branch() -> None:
    def f(y: Tensor) -> Any:
        g = custom_vjp(lambda x: x)
        g.defvjp(lambda x: (x, None), lambda _, ct: (ct * y,))
        return cond(y > 0, lambda x: grad(g)(x), lambda x: x, y)

    assert vmap(f)(torch.tensor([2.0, -1.0, 3.0])).tolist() == [2.0, -1.0, 3.0]


def test_a_batching_rule_closes_over_a_tensor_differentiated_outside() -> None:
    def f(z: Tensor) -> Any:
        scaled = custom_vmap(lambda x: x * z)
        scaled.def_vmap(lambda size, batched, x: (x * z, True))
        return vmap(scaled)(X).sum()

    for found in (grad(f)(ONE), jvp(f, (ONE,), (ONE,))[1], specialize(grad(f))(ONE)):
        torch.testing.assert_close(found, X.sum())


class _Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Holder:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def _weight_of(held: Any) -> Tensor:
    return held.weight


@pytest.mark.parametrize(
    "read", [lambda held: held.weight, lambda held: _weight_of(held)], ids=["itself", "helper"]
)
@pytest.mark.parametrize("kind", [_Slotted, _Holder])
def test_rules_read_attributes_of_objects(kind: Any, read: Callable[[Any], Tensor]) -> None:
    """This holds for attributes in slots, and for attributes that only a named function reads."""

    def slope(y: Tensor) -> Any:
        held = kind(y)
        f = custom_vjp(lambda x: 2 * x.sin())
        f.defvjp(lambda x: (f(x), ()), lambda _, ct: (2 * read(held).cos() * ct,))
        return grad(f)(ONE)

    def slope_forward(y: Tensor) -> Any:
        held = kind(y)
        f = custom_jvp(lambda x: 2 * x.sin())
        f.defjvp(lambda primals, tangents: (f(*primals), 2 * read(held).cos() * tangents[0]))
        return grad(f)(ONE)

    def value(y: Tensor) -> Any:
        held = kind(y)
        f = custom_vjp(lambda x: x * read(held))
        f.defvjp(lambda x: (x * read(held), ()), lambda _, ct: (ct,))
        return f(ONE)

    expected = -2 * X.sin()
    for each in (slope, slope_forward):
        torch.testing.assert_close(vmap(grad(each))(X), expected)
        torch.testing.assert_close(vmap(lambda x: jvp(each, (x,), (ONE,))[1])(X), expected)  # noqa: B023
        torch.testing.assert_close(specialize(grad(each))(X[0]), expected[0])
    torch.testing.assert_close(vmap(value)(X), X)
    with pytest.raises(errors.UndefinedDerivativeError, match="depends on a tensor"):
        grad(value)(X[0])


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.rest = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        for layer in self.rest:
            out = out + layer(x)
        return out


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "alone": lambda: nn.Linear(2, 2),
    "in layers of torch": lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))),
    "in layers of the user": _Layers,
    "in a dict": lambda: nn.ModuleDict({"one": nn.Sequential(nn.Linear(2, 2))}),
    "compiled": lambda: torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_of_inner_modules_are_closed_over(name: str) -> None:
    module = LAYERS[name]()
    functions = [module, lambda x: module(x), functools.partial(module)]
    if not isinstance(module, torch.jit.ScriptModule):  # its methods do not show their module
        functions.append(module.forward)
    for f in functions:
        found = {id(x) for x in consts_of([f])}
        assert found == {id(x) for x in module.parameters()}


@pytest.mark.parametrize("first", [grad, lambda f: jvp_slope(f)])
def test_a_rule_that_calls_a_module_with_given_parameters(first: Callable[..., Any]) -> None:
    """The module's own parameters require gradients, are reachable, and are not used."""
    module = nn.Linear(3, 1).double()
    params = {name: p.detach().clone() for name, p in module.named_parameters()}

    def plain(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(module, params, (x,))
        return out.sin().sum()

    f = custom_vjp(plain)

    def backward(residuals: Any, ct: Tensor) -> Any:
        return vjp(plain, *residuals)[1](ct)

    f.defvjp(lambda params, x: (f(params, x), (params, x)), backward)
    x = torch.stack([X[:3], X[1:]])
    same(vmap(first(f), (None, 0))(params, x), vmap(first(plain), (None, 0))(params, x))
    traced = specialize(vmap(first(f), (None, 0)))(params, x)
    same(traced, vmap(first(plain), (None, 0))(params, x))


def jvp_slope(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jvp(f, args, args)[1]
