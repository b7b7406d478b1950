"""custom_vjp, custom_jvp and custom_vmap: right under every transform, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import (
    cond,
    custom_jvp,
    custom_vjp,
    custom_vmap,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    sequential_vmap,
    specialize,
    vmap,
)
from tsfunc.errors import CustomRuleError

X = torch.linspace(-1, 2, 5, dtype=torch.float64)
Fn = Callable[[Tensor], Any]


@custom_vjp
def by_vjp(x: Any) -> Any:
    return {"y": x.sin() * x}


def _fwd(x: Any) -> Any:
    return {"y": x.sin() * x}, (x.cos(), {"x": x}, "kept")


def _bwd(residuals: Any, cotangent: Any) -> Any:
    cosine, saved, kept = residuals
    assert kept == "kept"
    return ((cosine * saved["x"] + saved["x"].sin()) * cotangent["y"],)


by_vjp.defvjp(_fwd, _bwd)


@custom_jvp
def by_jvp(x: Any, y: Any) -> Any:
    return x * y.sin()


@by_jvp.defjvp
def _rule(primals: Any, tangents: Any) -> Any:
    x, y = primals
    return by_jvp(x, y), tangents[0] * y.sin() + x * y.cos() * tangents[1]


by_jvps = custom_jvp(lambda x: {"y": x.sin() * x})
by_jvps.defjvps(lambda t, ans, x: {"y": t * (x.cos() * x + x.sin())})


@custom_vmap
def by_vmap(x: Any, w: Any) -> Any:
    return (x * w).sin() * x


@by_vmap.def_vmap
def _batched(axis_size: int, in_batched: Any, x: Any, w: Any) -> Any:
    assert in_batched[0] or in_batched[1]
    return (x * w).sin() * x, True


ROWS: dict[str, tuple[Fn, Fn]] = {
    "custom_vjp": (lambda x: by_vjp(x)["y"], lambda x: x.sin() * x),
    "custom_jvp": (lambda x: by_jvp(x, x * x), lambda x: x * (x * x).sin()),
    "defjvps": (lambda x: by_jvps(x)["y"], lambda x: x.sin() * x),
    "custom_vmap": (lambda x: by_vmap(x, X[3]), lambda x: (x * X[3]).sin() * x),
    "custom_vmap of two": (lambda x: by_vmap(x, 2 * x), lambda x: (2 * x * x).sin() * x),
}


def _pushed(f: Fn) -> Fn:
    return lambda x: jvp(f, (x,), (x.cos(),))[1]


COLUMNS: dict[str, Callable[[Fn], Fn]] = {
    "plain": lambda f: f,
    "grad": grad,
    "jvp": _pushed,
    "grad(grad)": lambda f: grad(grad(f)),
    "jvp(grad)": lambda f: _pushed(grad(f)),
    "grad(jvp)": lambda f: grad(_pushed(f)),
    "jvp(jvp)": lambda f: _pushed(_pushed(f)),
    "grad(grad(grad))": lambda f: grad(grad(grad(f))),
}


def _looped(f: Fn) -> Fn:
    return lambda xs: torch.stack([f(x) for x in xs])


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_the_rule_is_the_derivative_under_every_transform(row: str, column: str) -> None:
    ours, plain = ROWS[row]
    transform = COLUMNS[column]
    expected = _looped(transform(plain))(X)
    one = transform(ours)
    for found in (
        _looped(one)(X),
        vmap(one)(X),
        vmap(vmap(one))(X[None])[0],
        specialize(vmap(one))(X),
        vmap(transform(specialize(ours)))(X),
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("row", ROWS)
def test_derivatives_outside_of_the_vmap(row: str) -> None:
    ours, plain = ROWS[row]
    for inner in (lambda f: f, grad):
        found = grad(lambda x, inner=inner: vmap(inner(ours))(x).sin().sum())(X)
        expected = grad(lambda x, inner=inner: _looped(inner(plain))(x).sin().sum())(X)
        torch.testing.assert_close(found, expected)
        _, pushed = jvp(vmap(inner(ours)), (X,), (X.cos(),))
        torch.testing.assert_close(pushed, jvp(_looped(inner(plain)), (X,), (X.cos(),))[1])


def test_it_is_the_rule_that_is_used() -> None:
    wrong = custom_vjp(lambda x: x**2)
    wrong.defvjp(lambda x: (x**2, None), lambda _, ct: (10 * ct,))
    x = torch.tensor(3.0)
    assert grad(wrong)(x) == 10
    assert vmap(grad(wrong))(x[None]) == 10
    assert grad(specialize(wrong))(x) == 10
    assert specialize(grad(wrong))(x) == 10
    assert grad(lambda x: vmap(wrong)(x).sum())(x[None]) == 10
    assert grad(lambda x: cond(x > 0, wrong, torch.neg, x))(x) == 10
    assert vmap(grad(lambda x: cond(x > 0, wrong, torch.neg, x)))(torch.tensor([3.0, -3.0])).equal(
        torch.tensor([10.0, -1.0])
    )

    wrong_jvp = custom_jvp(lambda x: x**2)
    wrong_jvp.defjvp(lambda p, t: (p[0] ** 2, 10 * t[0]))
    assert jvp(wrong_jvp, (x,), (x,))[1] == 30
    assert grad(wrong_jvp)(x) == 10
    assert vmap(grad(specialize(wrong_jvp)))(x[None]) == 10

    wrong_vmap = custom_vmap(lambda x: x)
    wrong_vmap.def_vmap(lambda size, batched, x: (x + size, True))
    assert vmap(wrong_vmap)(torch.zeros(3)).tolist() == [3.0] * 3
    assert specialize(vmap(wrong_vmap))(torch.zeros(3)).tolist() == [3.0] * 3
    assert wrong_vmap(x) == 3


def test_arguments_that_are_not_differentiated() -> None:
    seen = []

    def fwd(power: int, x: Tensor) -> Any:
        return x**power, x

    def bwd(power: int, x: Tensor, ct: Tensor) -> Any:
        seen.append(power)
        return (power * x ** (power - 1) * ct,)

    f = custom_vjp(lambda power, x: x**power, nondiff_argnums=(0,))
    f.defvjp(fwd, bwd)
    assert grad(lambda x: f(3, x))(torch.tensor(2.0)) == 12
    assert seen == [3]
    g = custom_jvp(lambda x, power: x**power, nondiff_argnums=(1,))
    g.defjvp(lambda power, p, t: (p[0] ** power, power * p[0] ** (power - 1) * t[0]))
    assert grad(lambda x: g(x, 3))(torch.tensor(2.0)) == 12


def test_the_second_derivative_of_a_function_with_a_jvp_method_in_forward_mode() -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Any:
            return ctx.saved_tensors[0].cos() * tangent

    for transform in (COLUMNS["jvp(jvp)"], lambda f: vmap(_pushed(_pushed(f)))):
        torch.testing.assert_close(transform(Sine.apply)(X), transform(torch.sin)(X))
    mapped = _pushed(vmap(_pushed(Sine.apply)))
    torch.testing.assert_close(mapped(X), _pushed(_pushed(torch.sin))(X))


def test_rules_that_are_missing_or_malformed_are_errors() -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"custom_vjp: f has no rule yet.*@f.defvjp\(fwd, bwd\)"):

        @custom_vjp
        def f(x: Tensor) -> Tensor:
            return x

        f(x)
    with pytest.raises(RuntimeError, match=r"custom_vmap: g has no rule yet.*def_vmap"):

        @custom_vmap
        def g(x: Tensor) -> Tensor:
            return x

        vmap(g)(x)
    bad = custom_vjp(lambda x: x.sum())
    bad.defvjp(lambda x: x.sum(), lambda r, ct: (ct,))
    with pytest.raises(TypeError, match="expected a pair, the result and the residuals"):
        grad(bad)(x)
    bad.defvjp(lambda x: (x.sum(), None), lambda r, ct: (ct, ct))
    with pytest.raises(TypeError, match=r"expected a tuple of 1.*got 2"):
        grad(bad)(x)
    bad.defvjp(lambda x: (x.sum(), None), lambda r, ct: (ct,))
    with pytest.raises(
        TypeError,
        match=r"the cotangent of argument x: expected .* shape \(2,\), got .* shape \(\)",
    ):
        grad(bad)(x)
    worse = custom_jvp(lambda x: x.sum())
    worse.defjvp(lambda p, t: p[0].sum())
    with pytest.raises(TypeError, match="expected a pair, the result and its tangent"):
        jvp(worse, (x,), (x,))
    worse.defjvp(lambda p, t: (p[0].sum(), [t[0].sum()]))
    with pytest.raises(TypeError, match=r"that the rule of .*: expected the structure"):
        jvp(worse, (x,), (x,))
    short = custom_vmap(lambda x: x)
    short.def_vmap(lambda size, batched, x: x)
    with pytest.raises(TypeError, match="expected a pair, the result of all examples"):
        vmap(short)(x)
    short.def_vmap(lambda size, batched, x: (x[:1], True))
    with pytest.raises(TypeError, match=r"a first dim of size 2, the number of examples, .*got"):
        vmap(short)(x)
    with pytest.raises(TypeError, match="nondiff_argnums, which defjvps does not know of"):
        custom_jvp(torch.sin, nondiff_argnums=(0,)).defjvps(None)


def test_arguments_by_name_and_defaults_come_to_the_rules_by_position() -> None:
    f = custom_vjp(lambda x, y=3.0: x * y)
    f.defvjp(lambda x, y: (x * y, y), lambda y, ct: (10 * y * ct, None))
    x = torch.tensor(2.0)
    assert f(x) == 6 and f(y=4.0, x=x) == 8
    assert grad(lambda x: f(x))(x) == 30 and grad(lambda x: f(y=4.0, x=x))(x) == 40
    g = custom_jvp(lambda x, y=3.0, *, z=1.0: x * y * z)
    g.defjvp(lambda primals, tangents: (primals[0] * primals[1], 10 * tangents[0]))
    assert grad(lambda x: g(x))(x) == 10 and grad(lambda x: g(x, y=5.0))(x) == 10
    with pytest.raises(TypeError, match="by position, which z can't be given"):
        g(x, z=2.0)
    h = custom_vmap(lambda x, y=2.0: x * y)
    h.def_vmap(lambda size, batched, x, y: (x * y + size, True))
    assert vmap(lambda x: h(x=x))(x[None]) == 5
    with pytest.raises(TypeError, match="no signature by which the arguments x"):
        custom_vmap(torch.sin)(x=x)


def test_arguments_that_are_not_differentiated_by_name() -> None:
    f = custom_vjp(lambda x, power: x**power, nondiff_argnames="power")
    f.defvjp(
        lambda x, power: (x**power, x),
        lambda power, x, ct: (power * x ** (power - 1) * ct,),
    )
    assert grad(lambda x: f(x, power=3))(torch.tensor(2.0)) == 12
    g = custom_jvp(lambda f, x: f(x), nondiff_argnums=0)
    g.defjvp(lambda f, primals, tangents: (f(*primals), 7 * tangents[0]))
    assert grad(lambda x: g(torch.sin, x))(torch.tensor(2.0)) == 7
    with pytest.raises(ValueError, match=r"nondiff_argnames: expected names .*, got 'n'"):
        custom_vjp(lambda x: x, nondiff_argnames=["n"])


def test_without_differentiation_the_function_itself_runs() -> None:
    ran: list[str] = []

    def fwd(x: Tensor) -> Any:
        ran.append("fwd")
        return x * 2, None

    @custom_vjp
    def f(x: Tensor) -> Tensor:
        ran.append("func")
        return x * 2

    f.defvjp(fwd, lambda _, ct: (2 * ct,))
    plain: list[Any] = [f, vmap(f), lambda x: grad(lambda y: (y * f(x)).sum())(x)]
    inside: list[Any] = [
        grad(lambda x: f(x).sum()), vmap(grad(f)), grad(lambda x: vmap(f)(x).sum()),
    ]  # fmt: skip
    for calls, want in ((plain, "func"), (inside, "fwd")):
        for call in calls:
            ran.clear()
            call(X)
            assert ran == [want]


def test_methods_and_integers() -> None:
    class Layer:
        scale = 3.0

        @custom_vjp
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return self.scale * x * n

    Layer.forward.defvjp(
        lambda self, x, n: (self.scale * x * n, (self.scale, n)),
        lambda saved, ct: (None, 10 * saved[0] * saved[1] * ct, None),
    )
    layer, n = Layer(), torch.tensor(2)
    assert grad(lambda x: layer.forward(x, n))(torch.tensor(1.0)) == 60
    assert vmap(grad(lambda x, n: layer.forward(x, n)))(X.float(), torch.arange(5)).tolist() == [
        0.0, 30.0, 60.0, 90.0, 120.0,
    ]  # fmt: skip


def test_tangents_and_cotangents_of_other_types_are_errors() -> None:
    x = torch.ones(3)
    f = custom_jvp(lambda x: x * 2)
    f.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0].sum()))
    match = r"the tangent of a result: expected torch.float32 of shape \(3,\), got"
    with pytest.raises(TypeError, match=match):
        jvp(f, (x,), (x,))
    f.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0].double()))
    with pytest.raises(TypeError, match=match):
        grad(lambda x: f(x).sum())(x)
    f.defjvp(lambda primals, tangents: ((primals[0],), (tangents[0],)))
    with pytest.raises(TypeError, match="expected the structure of the function's result"):
        jvp(f, (x,), (x,))
    g = custom_vjp(lambda x: x * 2)
    g.defvjp(lambda x: (x * 2, None), lambda _, ct: ("no",))
    with pytest.raises(TypeError, match="expected a tensor, or None for zeros, got 'no'"):
        grad(lambda x: g(x).sum())(x)


def test_programs_keep_batching_rules() -> None:
    f = custom_vmap(lambda x: x.sin())
    f.def_vmap(lambda size, batched, x: (x.cos(), batched[0]))
    program = specialize(f)
    torch.testing.assert_close(program(X), X.sin())
    torch.testing.assert_close(vmap(program)(X), X.cos())
    torch.testing.assert_close(specialize(vmap(program))(X), X.cos())
    torch.testing.assert_close(vmap(grad(program))(X), -X.sin())
    torch.testing.assert_close(jvp(program, (X,), (X,))[1], X * X.cos())


def test_sequential_vmap_takes_one_example_at_a_time() -> None:
    seen: list[tuple[int, ...]] = []

    @sequential_vmap
    def f(x: Tensor, tree: dict[str, Tensor]) -> Any:
        seen.append(tuple(x.shape))
        return {"y": x * tree["a"]}

    for transform in (lambda f: f, specialize):
        for in_dims, args in (((0, None), (X, {"a": X[1]})), ((None, 0), (X[1], {"a": X}))):
            found = transform(vmap(f, in_dims=in_dims))(*args)
            torch.testing.assert_close(found["y"], X * X[1])
        slopes = transform(grad(lambda x: vmap(f)(x, {"a": x})["y"].sum()))(X)
        torch.testing.assert_close(slopes, 2 * X)
        torch.testing.assert_close(vmap(vmap(f))(X[None], {"a": X[None]})["y"], X[None] ** 2)
    assert set(seen) == {()}


def test_rules_of_two_kinds_on_one_function() -> None:
    @custom_vjp
    @custom_vmap
    def f(x: Any) -> Any:
        return x.sin()

    f.def_vmap(lambda size, in_batched, x: (x.sin() + size, True))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (10 * ct,))
    assert vmap(f)(X).equal(X.sin() + len(X)) and grad(f)(X[0]) == 10
    with pytest.raises(AttributeError, match="no attribute 'defjvp'"):
        _ = f.defjvp


def test_named_sizes_among_the_arguments_in_programs() -> None:
    by_vjp = custom_vjp(lambda x, n: x * n)
    by_vjp.defvjp(lambda x, n: (x * n, n), lambda n, ct: (10 * n * ct, None))
    fixed = custom_jvp(lambda x, n: x * n, nondiff_argnums=1)
    fixed.defjvp(lambda n, primals, tangents: (primals[0] * n, 10 * n * tangents[0]))
    for f in (by_vjp, fixed):
        program = specialize(
            lambda x, f=f: f(x, x.shape[0]), {"x": Meta(shape=["n"], dtype=torch.float32)}
        )
        for n in (3, 4):
            x = torch.ones(n)
            assert program(x).tolist() == [n] * n
            assert grad(lambda x, p=program: p(x).sum())(x).tolist() == [10 * n] * n
        assert program.cache_info().programs == 2  # with autograd, and without


@custom_vmap
def halved_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@halved_sine.def_vmap
def _halved(axis_size: int, in_batched: Any, x: torch.Tensor) -> Any:
    # Not the function, to show which rule ran.
    return x.sin() / 2, in_batched[0]


def test_a_batching_rule_runs_if_only_a_tangent_is_batched() -> None:
    x, tangents = torch.tensor(0.7), torch.tensor([1.0, 2.0])

    def pushed(x: torch.Tensor, t: torch.Tensor) -> Any:
        return jvp(halved_sine, (x,), (t,))

    y, ty = vmap(pushed, in_dims=(None, 0), out_dims=(None, 0))(x, tangents)
    torch.testing.assert_close(y, x.sin() / 2)
    torch.testing.assert_close(ty, x.cos() / 2 * tangents)
    torch.testing.assert_close(jacfwd(halved_sine)(tangents), (tangents.cos() / 2).diag())


@pytest.mark.parametrize("run", [lambda f: f, specialize], ids=["eager", "specialize"])
def test_jacobians_of_batching_rules(run: Any) -> None:
    xs = torch.arange(6.0).view(3, 2)
    slopes = torch.diag_embed(xs.cos() / 2)
    for jacobian in (jacrev, jacfwd):
        torch.testing.assert_close(run(vmap(jacobian(halved_sine)))(xs), slopes)
    second = torch.diag_embed(-xs.sin() / 2)
    found = run(vmap(jacrev(lambda x: jacrev(halved_sine)(x).sum(0))))(xs)
    torch.testing.assert_close(found, second)
    torch.testing.assert_close(run(vmap(hessian(lambda x: halved_sine(x).sum())))(xs), second)


def test_a_batching_rule_returns_the_structure_that_the_function_does() -> None:
    calls: list[torch.Size] = []

    def pair(x: torch.Tensor, scale: float) -> Any:
        calls.append(x.shape)
        return {"a": x * scale, "b": None}

    f = custom_vmap(pair)
    f.def_vmap(lambda size, batched, x, scale: ({"a": x * scale, "b": None}, True))
    for _ in range(2):
        assert vmap(f, in_dims=(0, None))(torch.ones(3), 2.0)["a"].tolist() == [2, 2, 2]
    assert calls == [torch.Size([])]  # once, without data
    f.def_vmap(lambda size, batched, x, scale: ([x * scale], True))
    with pytest.raises(
        CustomRuleError, match=r"rule of pair: expected .* structure, .*\{'a': \*.*got.*\[\*\]"
    ):
        vmap(f, in_dims=(0, None))(torch.ones(3), 2.0)


def test_functions_that_need_data_are_not_compared_with_their_batching_rules() -> None:
    f = custom_vmap(lambda x: x if x > 0 else -x)
    f.def_vmap(lambda size, batched, x: (x.abs(), True))
    assert vmap(f)(torch.tensor([1.0, -2.0])).tolist() == [1, 2]


def test_the_structure_of_a_result_may_depend_on_a_closed_over_value() -> None:
    several = False

    def result(x: torch.Tensor) -> Any:
        return (x, x) if several else x

    f = custom_vmap(result)
    f.def_vmap(lambda size, batched, x: (result(x), True))
    assert vmap(f)(torch.ones(2)).tolist() == [1, 1]
    several = True
    assert [x.tolist() for x in vmap(f)(torch.ones(2))] == [[1, 1], [1, 1]]
