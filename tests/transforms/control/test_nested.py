"""Control flow inside of control flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tsfunc import (
    checkpoint,
    cond,
    custom_vmap,
    fori_loop,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    scan,
    specialize,
    switch,
    vjp,
    vmap,
    while_loop,
)
from tsfunc.bridge.control.bodies import BodyLevel
from tsfunc.bridge.control.subsets import SubsetLevel

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])


def triangle(n: torch.Tensor) -> Any:
    """Count the pairs (i, j) with j <= i < n."""

    def row(i: Any, count: Any) -> Any:
        return while_loop(lambda s: s[0] <= i, lambda s: (s[0] + 1, s[1] + 1), (0, count))[1]

    return while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, row(s[0], s[1])), (0, 0))[1]


@WRAPS
def test_a_loop_in_a_loop(wrap: Any) -> None:
    for size in (0, 1, 3, 4):
        assert wrap(triangle)(torch.tensor(size)) == size * (size + 1) // 2
    n = torch.tensor([4, 0, 3, 1])
    torch.testing.assert_close(wrap(vmap(triangle))(n), n * (n + 1) // 2)
    torch.testing.assert_close(vmap(wrap(triangle))(n), n * (n + 1) // 2)


@WRAPS
def test_an_inner_loop_restarts_in_every_step_of_each_example(wrap: Any) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        def turn(state: Any) -> Any:
            value, i = state
            inner = while_loop(
                lambda s: s[1] < b + 1, lambda s: (s[0] + i + s[1], s[1] + 1), (value, 0)
            )
            return inner[0], i + 1

        return while_loop(lambda s: s[1] < a + 1, turn, (0, 0))[0]

    n = torch.arange(5)
    expected = [sum(i + j for i in range(k + 1) for j in range(k + 1)) for k in range(5)]
    assert wrap(vmap(f))(n, n).tolist() == expected


@WRAPS
def test_a_branch_in_a_branch(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(x < 2, lambda: 2 * x, lambda: cond(x < 5, lambda: 3 * x, lambda: x * x))

    x = torch.tensor([1.0, 3.0, 6.0])
    expected = torch.tensor([2.0, 9.0, 36.0])
    torch.testing.assert_close(torch.stack([wrap(f)(one) for one in x]), expected)
    torch.testing.assert_close(wrap(vmap(f))(x), expected)
    torch.testing.assert_close(wrap(vmap(grad(f)))(x), torch.tensor([2.0, 3.0, 12.0]))
    torch.testing.assert_close(wrap(vmap(grad(grad(f))))(x), torch.tensor([0.0, 0.0, 2.0]))


@WRAPS
def test_branches_in_steps_in_branches(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        def step(carry: Any, row: torch.Tensor) -> Any:
            new = switch((row > 0).long(), [lambda: carry * row, lambda: carry + row.sin()])
            return new, new * x

        def down() -> Any:
            total, ys = scan(step, x, torch.tensor([0.5, -1.5, 2.0]))
            return fori_loop(0, 2, lambda i, c: c * total, total) + ys.sum()

        return cond(x > 0, down, lambda: x.cos())

    def plain(x: torch.Tensor) -> torch.Tensor:
        if x <= 0:
            return x.cos()
        c, ys = x, []
        for row in (0.5, -1.5, 2.0):
            c = c + torch.tensor(row).sin() if row > 0 else c * row
            ys.append(c * x)
        return c**3 + torch.stack(ys).sum()

    x = torch.tensor([0.7, -0.3, 1.2])
    for ours, theirs in ((f, plain), (grad(f), grad(plain)), (grad(grad(f)), grad(grad(plain)))):
        expected = torch.stack([theirs(one) for one in x])
        torch.testing.assert_close(torch.stack([wrap(ours)(one) for one in x]), expected)
        torch.testing.assert_close(wrap(vmap(ours))(x), expected)


def _by_tensor(x: torch.Tensor) -> Any:
    return cond(x.sum() > 0, lambda: x.sin() * x[0], lambda: x.cos())


def _by_floor(x: torch.Tensor) -> Any:
    # Floor division has no formula for tangents, so forward mode takes two backward passes.
    return switch((x.sum() // 1).to(torch.int32), [lambda: 3 * x, lambda: x.sin()])


def _by_steps(x: torch.Tensor) -> Any:
    return while_loop(lambda y: y.sum() < 8, lambda y: y * y + x, x)


@pytest.mark.parametrize("f", [_by_tensor, _by_floor, _by_steps])
def test_jacobians_of_traced_control_flow(f: Any) -> None:
    x = torch.tensor([1.3, 0.4], dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(f, x)
    for jacobian in (jacrev, jacfwd):
        torch.testing.assert_close(specialize(jacobian(f))(x), expected)
        torch.testing.assert_close(jacobian(specialize(f))(x), expected)
        batch = torch.stack([x, x * 2])
        every = torch.stack([torch.autograd.functional.jacobian(f, one) for one in batch])
        torch.testing.assert_close(specialize(vmap(jacobian(f)))(batch), every)
    second = torch.autograd.functional.hessian(lambda x: f(x).sum(), x)
    torch.testing.assert_close(specialize(jacrev(jacrev(lambda x: f(x).sum())))(x), second)
    torch.testing.assert_close(specialize(jacfwd(jacrev(lambda x: f(x).sum())))(x), second)


def test_a_level_in_the_place_of_another_has_every_slot_of_it() -> None:
    seen = []

    def look(x: torch.Tensor) -> Any:
        seen.extend(_stand_ins())
        return x

    vmap(lambda x: cond(x > 0, look, torch.neg, x))(torch.tensor([1.0, -1.0]))
    specialize(lambda x: cond(x > 0, look, torch.neg, x))(torch.tensor(1.0))
    assert {type(level) for level in seen} == {SubsetLevel, BodyLevel}
    for level in seen:
        names = {name for cls in type(level).__mro__ for name in cls.__dict__.get("__slots__", ())}
        assert {name for name in names if not hasattr(level, name)} == set()


def _stand_ins() -> list[Any]:
    from tsfunc.dispatch.state import tls

    return [level for level in tls.state.levels if isinstance(level, SubsetLevel | BodyLevel)]


@pytest.mark.parametrize("derivative", [jacfwd, hessian], ids=["jacfwd", "hessian"])
@pytest.mark.parametrize("name", ["cond", "while_loop"])
def test_programs_of_jacobians_of_choices_that_differ(derivative: Any, name: str) -> None:
    """The Jacobian's own vmap is inside of the vmap whose examples are in subsets."""

    def choosing(x: torch.Tensor) -> Any:
        if name == "cond":
            return cond(x.sum() > 0, lambda x: (x**3).sum(), lambda x: x.sin().sum(), x)
        return while_loop(lambda c: c.sum() < 3, lambda c: c * c + 1, x).sum()

    x = torch.tensor([[0.5, -1.5], [0.3, 1.2]], dtype=torch.float64)
    expected = torch.stack([derivative(choosing)(row) for row in x])
    torch.testing.assert_close(specialize(vmap(derivative(choosing)))(x), expected)


def test_loops_of_nested_vmaps_run_on_the_active_examples_of_both() -> None:
    """The inner vmap's subsets are selected from the remaining subset of the outer loop."""
    w = torch.tensor([0.5, -0.25, 1.5], dtype=torch.float64)

    def loops(x: torch.Tensor, until: Any) -> Any:
        def turn(state: Any) -> Any:
            n, c = state
            inner = until(
                lambda s: s[0] < n + (x > 0).sum(), lambda s: (s[0] + 1, s[1] * w + x), (n * 0, c)
            )
            return n + 1, inner[1].sin()

        return until(lambda s: s[0] < 2 + (x > 0.3).sum(), turn, (torch.tensor(0), x))[1]

    def plain(going: Any, body: Any, carry: Any) -> Any:
        while going(carry):
            carry = body(carry)
        return carry

    x = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([torch.stack([loops(row, plain) for row in rows]) for rows in x])
    twice = vmap(vmap(lambda x: loops(x, while_loop)))
    torch.testing.assert_close(twice(x), expected)
    torch.testing.assert_close(specialize(twice)(x), expected)
    slopes = [[torch.func.grad(lambda x: loops(x, plain).sum())(r) for r in rows] for rows in x]
    found = vmap(vmap(grad(lambda x: loops(x, while_loop).sum())))(x)
    torch.testing.assert_close(found, torch.stack([torch.stack(rows) for rows in slopes]))


_ROWS = torch.tensor([[0.3, 1.0, -2.0], [0.1, 0.2, 0.5], [-1.0, 0.4, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize(
    "around",
    [
        lambda f: checkpoint(f),
        lambda f: lambda x: scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: while_loop(lambda c: c.sum() < 3, lambda c: f(c) + 1, x),
        lambda f: lambda x: cond(x.sum() > 0, lambda: f(x), lambda: x),
        lambda f: checkpoint(lambda x: fori_loop(0, 2, lambda i, c: f(c + i), x)),
    ],
    ids=["checkpoint", "scan", "while_loop", "cond", "a loop in a checkpoint"],
)
def test_a_vmap_in_a_traced_body_may_choose_by_example(around: Any) -> None:
    def branches(x: torch.Tensor) -> Any:
        return vmap(lambda r: cond((r * x).sum() > 0, lambda: r * x, lambda: x.sin()))(_ROWS).sum(0)

    def loops(x: torch.Tensor) -> Any:
        grown = lambda r: while_loop(lambda c: c.sum() < x.sum(), lambda c: c + r**2 + 0.1, r * x)  # noqa: E731
        return vmap(grown)(_ROWS).sum(0)

    x = torch.tensor([0.7, -0.2, 0.4], dtype=torch.float64)
    for f in (around(branches), around(loops)):
        torch.testing.assert_close(specialize(f)(x), f(x))
        per_example = vmap(grad(lambda x, f=f: f(x).sum()))
        xs = torch.stack([x, x / 2, -x])
        torch.testing.assert_close(specialize(per_example)(xs), per_example(xs))


def ruled(f: Any) -> Any:
    """Return a function with a batching rule that maps the function itself."""
    made = custom_vmap(f)

    @made.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> Any:
        return vmap(f, in_dims=tuple(0 if flag else None for flag in batched))(*args), True

    return made


@pytest.mark.parametrize("derivative", [None, grad, jacfwd], ids=["value", "grad", "jacfwd"])
@pytest.mark.parametrize(
    "around",
    [
        lambda f, y, x: checkpoint(f)(y, x),
        lambda f, y, x: cond(y.sum() < 9, f, lambda y, x: x.sin(), y, x),
        lambda f, y, x: fori_loop(0, 2, lambda i, c: f(y, c), x),
        lambda f, y, x: scan(lambda c, a: (f(a * y, c), None), x, y)[0],
    ],
    ids=["checkpoint", "cond", "fori_loop", "scan"],
)
@pytest.mark.parametrize(
    "inner",
    [
        lambda y, x: cond(y.sum() < x[0], torch.sin, torch.cos, x),
        lambda y, x: switch((x.sum() * 2).long(), [torch.sin, lambda z: z * y.sum()], x),
        lambda y, x: fori_loop(0, 2, lambda i, c: (c + y[i]).sin(), x),
        lambda y, x: scan(lambda c, a: ((c * a).sin(), None), x, y)[0],
        lambda y, x: while_loop(lambda c: c.sum() > y[0], lambda c: c - y.abs().sum() - 1, x),
        lambda y, x: checkpoint(lambda z: (z * y.sum()).sin())(x),
    ],
    ids=["cond", "switch", "fori_loop", "scan", "while_loop", "checkpoint"],
)
def test_a_batching_rule_in_a_traced_body_may_use_control_flow(
    inner: Any, around: Any, derivative: Any
) -> None:
    y = torch.rand(3, dtype=torch.float64) + 0.5
    x = torch.rand(4, 2, dtype=torch.float64)

    def run(f: Any, row: torch.Tensor) -> Any:
        if derivative is None:
            return around(f, y, row)
        if derivative is grad:
            return grad(lambda row: around(f, y, row).sum())(row)
        return derivative(lambda row: around(f, y, row))(row)

    expected = torch.stack([run(inner, row) for row in x])
    f = ruled(inner)
    torch.testing.assert_close(specialize(vmap(lambda row: run(f, row)))(x), expected)


@pytest.mark.parametrize("batched", [(True, False), (False, True)])
@pytest.mark.parametrize("derivative", [grad, jacrev, hessian])
@pytest.mark.parametrize(
    "loop",
    [
        lambda p, y: fori_loop(0, 3, lambda i, c: c.sin() + y[i] * p, y.prod()),
        lambda p, y: scan(lambda c, a: (c.sin() + a * p, None), y.prod(), y)[0],
        lambda p, y: while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1].sin() + y[s[0]] * p), (0, y.prod())
        )[1],
    ],
    ids=["fori_loop", "scan", "while_loop"],
)
def test_loops_in_nested_vmaps_that_start_from_a_differentiated_value(
    loop: Any, derivative: Any, batched: Any
) -> None:
    sizes = [size if own else 1 for size, own in zip((4, 2), batched, strict=True)]
    p, y = torch.rand(sizes, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    given = p.reshape([size for size, own in zip((4, 2), batched, strict=True) if own])

    def total(y: torch.Tensor) -> Any:
        of_rows = vmap(lambda p, _: loop(p, y), (0 if batched[1] else None, 0))
        of_all = vmap(lambda p, _: of_rows(p, torch.ones(2)), (0 if batched[0] else None, 0))
        return of_all(given, torch.ones(4)).cos().sum()

    def plain(y: torch.Tensor) -> Any:
        c = y.prod()
        for a in y:
            c = c.sin() + a * p
        return c.expand(4, 2).cos().sum()

    slope = torch.func.jacrev(plain)
    expected = (torch.func.jacrev(slope) if derivative is hessian else slope)(y)
    torch.testing.assert_close(specialize(derivative(total))(y), expected)


FLOWS = pytest.mark.parametrize(
    "flow",
    [
        lambda q: fori_loop(0, 3, lambda i, c: c.sin() + q, q),
        lambda q: while_loop(lambda c: c.sum() < 3, lambda c: c + q**2 + 1, q),
        lambda q: cond(q.sum() > 0, torch.sin, torch.cos, q),
        lambda q: checkpoint(torch.sin)(q),
    ],
    ids=["fori_loop", "while_loop", "cond", "checkpoint"],
)


@pytest.mark.parametrize("outside", [vmap, lambda f: vmap(vmap(f)), jacrev])
@pytest.mark.parametrize("derivative", [jacfwd, jacrev, hessian, lambda f: jacfwd(jacfwd(f))])
@FLOWS
def test_a_program_differentiates_by_a_closed_over_value_of_an_outer_level(
    flow: Any, derivative: Any, outside: Any
) -> None:
    x = torch.rand(2, 2, 2, dtype=torch.float64) - 0.5

    def of(wrap: Any) -> Any:
        def f(v: torch.Tensor) -> Any:
            v = v.reshape(-1)
            return wrap(lambda one: one * derivative(flow)(v))(torch.ones(()))

        return outside(f)(x)

    torch.testing.assert_close(of(specialize), of(lambda f: f))


@pytest.mark.parametrize("outside", [vmap, lambda f: vmap(vmap(f))])
@pytest.mark.parametrize("inside", [vmap, lambda f: f])
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, v, t: vjp(f, v)[1](t)[0],
        lambda f, v, t: jvp(f, (v,), (t,))[1],
        lambda f, v, t: linearize(f, v)[1](t),
        lambda f, v, t: jvp(lambda v: vjp(f, v)[1](t)[0], (v,), (t,))[1],
        lambda f, v, t: jvp(lambda v: jvp(f, (v,), (t,))[1], (v,), (t,))[1],
    ],
    ids=["vjp", "jvp", "linearize", "jvp of vjp", "jvp of jvp"],
)
@FLOWS
def test_a_program_takes_a_closed_over_cotangent_or_tangent_of_an_outer_level(
    flow: Any, derivative: Any, inside: Any, outside: Any
) -> None:
    t, v = torch.rand(2, 2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)

    def of(wrap: Any) -> Any:
        def f(t: torch.Tensor) -> Any:
            t = t.reshape(-1)[:3]
            return wrap(inside(lambda v: derivative(flow, v.reshape(-1)[:3], t)))(v)

        return outside(f)(t)

    torch.testing.assert_close(of(specialize), of(lambda f: f))


def grad_of_sum(f: Any) -> Any:
    return grad(lambda x: f(x).sin().sum())


def tangent_along_cosine(f: Any) -> Any:
    return lambda x: jvp(f, (x,), (x.cos(),))[1]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [lambda f: f, grad_of_sum, tangent_along_cosine])
@pytest.mark.parametrize("outer", [jacfwd, jacrev, lambda f: jacfwd(jacfwd(f))])
@pytest.mark.parametrize(
    "flow",
    [
        lambda x: checkpoint(torch.t)(x),
        lambda x: checkpoint(lambda x: x.sin() @ x.T)(x),
        lambda x: scan(lambda c, _: (c.T.sin(), c.T), x, None, length=3)[1],
        lambda x: cond(x.sum() > -100, lambda: x.T.sin(), lambda: x.T),
    ],
    ids=["transpose", "product", "scan", "branches"],
)
def test_derivatives_of_control_flow_in_programs_have_any_layout(
    flow: Any, outer: Any, inner: Any, transposed: bool, flipped: bool
) -> None:
    x = torch.rand(2, 2, dtype=torch.float64)
    x = x.T if transposed else x

    def flat(x: torch.Tensor) -> Any:
        y = inner(flow)(x)
        return (y.mT if flipped else y).reshape(-1)

    derivative = outer(flat)
    torch.testing.assert_close(specialize(derivative)(x), derivative(x))
