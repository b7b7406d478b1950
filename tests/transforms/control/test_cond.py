"""``cond`` and ``switch``: forms of calls, operands, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsfunc
from tsfunc import MetaTensorType, checkpoint, cond, grad, specialize, switch, vmap
from tsfunc.errors import TypeCheckError


def test_the_branch_of_a_bool_is_called() -> None:
    x = torch.tensor(2.0)
    assert cond(True, torch.neg, torch.exp, x) == -2
    assert cond(torch.tensor([False]), torch.neg, lambda x: x + 1, x) == 3


def test_operands_are_taken_as_jax_and_as_torch_take_them() -> None:
    x, y = torch.tensor(2.0), torch.tensor(5.0)
    assert cond(True, torch.add, torch.sub, x, y) == 7
    assert cond(True, lambda x, y: x + y, lambda x, y: x - y, (x, y)) == 7
    assert cond(True, lambda pair: pair[0] * pair[1], lambda pair: pair[0], (x, y)) == 10


def test_the_index_of_a_switch_is_clamped() -> None:
    branches = [lambda: 0, lambda: 1, lambda: 2]
    assert [switch(i, branches) for i in (-3, 0, 1, 2, 9)] == [0, 0, 1, 2, 2]
    assert [switch(torch.tensor(i), branches) for i in (-3, 1, 9)] == [0, 1, 2]


def test_under_vmap_a_branch_sees_only_the_examples_that_take_it() -> None:
    seen = []

    def positive(x: torch.Tensor) -> torch.Tensor:
        seen.append("positive")
        return x.sqrt()

    def negative(x: torch.Tensor) -> torch.Tensor:
        seen.append("negative")
        return x

    x = torch.tensor([4.0, 9.0])
    out = vmap(lambda x: cond(x > 0, positive, negative, x))(x)
    torch.testing.assert_close(out, torch.tensor([2.0, 3.0]))
    assert seen == ["positive"]


def test_a_branch_that_is_not_taken_puts_no_nan_into_a_gradient() -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(x > 0, lambda: x.sqrt(), lambda: torch.zeros_like(x))

    x = torch.tensor([4.0, 0.0, -1.0])
    expected = torch.tensor([0.25, 0.0, 0.0])
    torch.testing.assert_close(vmap(grad(f))(x), expected)
    torch.testing.assert_close(specialize(vmap(grad(f)))(x), expected)
    torch.testing.assert_close(grad(lambda x: vmap(f)(x).sum())(x), expected)


def test_a_branch_that_would_fail_where_it_is_not_taken_does_not() -> None:
    matrices = torch.stack([torch.eye(2), torch.zeros(2, 2)])

    def f(a: torch.Tensor) -> Any:
        return cond(a.sum() > 0, torch.linalg.inv, torch.neg, a)

    torch.testing.assert_close(vmap(f)(matrices), matrices)
    torch.testing.assert_close(specialize(vmap(f))(matrices), matrices)


@pytest.mark.parametrize("batching", ["subset", "select"])
def test_both_ways_to_batch_give_the_same(batching: Any) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    out = vmap(lambda x: cond(x > 0, torch.sin, torch.cos, x, batching=batching))(x)
    torch.testing.assert_close(out, torch.where(x > 0, x.sin(), x.cos()))


def test_closed_over_parameters_get_their_gradients() -> None:
    w = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor([1.0, -2.0, 4.0])
    vmap(lambda x: cond(x > 0, lambda: w * x, lambda: x))(x).sum().backward()
    assert w.grad == 5


def test_random_branches_draw_for_their_own_examples() -> None:
    x = torch.tensor([1.0, -1.0, 1.0, 1.0])

    def f(x: torch.Tensor) -> Any:
        return cond(x > 0, lambda: torch.rand(3), lambda: torch.zeros(3))

    out = vmap(f, randomness="different")(x)
    assert (out[1] == 0).all()
    assert len({float(row[0]) for row in out}) == 4


@pytest.mark.parametrize("run", [vmap, specialize], ids=["vmap", "specialize"])
def test_branches_of_two_types_are_refused_with_both_shown(run: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return cond((x > 0).any(), lambda: {"a": x}, lambda: {"a": x.double()})

    with pytest.raises(TypeCheckError) as error:
        run(f)(torch.tensor([[1.0], [-1.0]]))
    text = str(error.value)
    assert "the result of false_fun: {'a': f64[" in text
    assert "the result of true_fun: {'a': f32[" in text
    assert "At result['a'] one is f64[" in text
    assert "x.to(dtype)" in text


def test_branches_of_two_structures_are_refused() -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(x > 0, lambda: (x, x), lambda: x)

    with pytest.raises(TypeError, match=r"the result of true_fun: \(f32\[\], f32\[\]\)"):
        vmap(f)(torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        (lambda x: (x, 1), lambda x: (x, True), r"At result\[1\] one is bool, the other int"),
        (lambda x: "mean", lambda x: "sum", "At result one is 'sum', the other 'mean'"),
        (lambda x: [x, x[None]], lambda x: [x, x], r"result\[1\] one is f32\[\], the other f32\[1"),
        (lambda x: x, lambda x: x.to("meta"), r"one is f32\[\] meta, the other f32\[\] cpu"),
        (lambda x: None, lambda x: x, r"At result one is f32\[\], the other None"),
    ],
)
def test_each_place_where_branches_differ_is_shown(one: Any, other: Any, line: str) -> None:
    with pytest.raises(TypeCheckError, match=line):
        vmap(lambda x: cond(x > 0, one, other, x))(torch.tensor([1.0, -1.0]))


def test_sizes_of_branches_go_by_the_users_names() -> None:
    def f(x: torch.Tensor, on: torch.Tensor) -> Any:
        return cond(on, lambda: x.t(), lambda: torch.cat([x, x]))

    s = specialize(f, {"x": MetaTensorType(shape=["n", 3])})
    with pytest.raises(TypeCheckError, match=r"one is f32\[2 \* n, 3\], the other f32\[3, n\]"):
        s(torch.ones(4, 3), torch.tensor(True))


def test_invalid_choices_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="expected a bool, an int or a tensor of one element"):
        cond("yes", torch.sin, torch.cos, x)
    with pytest.raises(TypeError, match=r"got one of shape \(2,\).*use torch.where"):
        cond(x > 0, torch.sin, torch.cos, x)
    with pytest.raises(TypeError, match=r"a bool or an integer, got a tensor of torch\.float32"):
        switch(x[0], [torch.sin, torch.cos], x)
    with pytest.raises(TypeError, match="the index: expected an integer, got a bool"):
        switch(True, [torch.sin], x)
    with pytest.raises(ValueError, match="at least one branch"):
        switch(0, [], x)
    with pytest.raises(ValueError, match=r"expected .subset. or .select., got 'both'"):
        cond(True, torch.sin, torch.cos, x, batching="both")  # type: ignore[arg-type]


def test_a_branch_writes_into_the_tensors_of_its_examples() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x * 1
        return cond(x > 0, lambda: y.add_(1), lambda: y), y

    for call in vmap(f), tsfunc.specialize(vmap(f)):
        out, y = call(torch.tensor([1.0, -1.0]))
        assert out.tolist() == y.tolist() == [2.0, -1.0]


def test_nested_branches_use_tensors_from_outside_both() -> None:
    x, w = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    yes = torch.tensor(True)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x.cos() * w).sin() * w).sum()

    def nested(x: torch.Tensor, w: torch.Tensor) -> Any:
        def outer(x: torch.Tensor) -> Any:
            return tsfunc.cond(yes, lambda y: y.sin() * w, lambda y: y * w, x.cos() * w)

        return tsfunc.cond(yes, outer, lambda x: x * w, x).sum()

    for both in ((0, 1), (1, 0)):
        want = tsfunc.grad(plain, both)(x, w)
        for made in (nested, tsfunc.specialize(nested)):
            for got, slope in zip(tsfunc.grad(made, both)(x, w), want, strict=True):
                torch.testing.assert_close(got, slope)
    each = tsfunc.vmap(tsfunc.grad(plain, (0, 1)), (0, None))(x[:, None], w)
    found = tsfunc.specialize(tsfunc.vmap(tsfunc.grad(nested, (0, 1)), (0, None)))(x[:, None], w)
    for got, slope in zip(found, each, strict=True):
        torch.testing.assert_close(got, slope)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, checkpoint, lambda f: checkpoint(checkpoint(f))],
    ids=["inside", "around", "twice"],
)
def test_a_checkpoint_of_a_branch_that_only_some_examples_take(wrap: Any) -> None:
    """The rerun uses the subsets that the graph of the first run belongs to."""

    def f(x: torch.Tensor) -> Any:
        inner = checkpoint(lambda x: cond(x < 1, torch.exp, lambda x: x * x, x))
        return cond(x > 0, lambda x: x.sin() * inner(x), lambda x: inner(x.cos()) * x, x)

    x = torch.tensor([0.5, -0.5, 2.0, -3.0], dtype=torch.float64)
    g = wrap(f)
    expected = torch.stack([grad(f)(row) for row in x])
    torch.testing.assert_close(vmap(grad(g))(x), expected)
    torch.testing.assert_close(grad(lambda x: vmap(g)(x).sum())(x), expected)
    curved = torch.stack([grad(grad(f))(row) for row in x])
    torch.testing.assert_close(vmap(grad(grad(g)))(x), curved)


@pytest.mark.parametrize("constant", [torch.sgn, torch.floor, torch.frac, lambda x: x.detach() * 1])
def test_branches_that_close_over_values_with_a_constant_tangent(constant: Any) -> None:
    """torch makes the zero tangent of a captured value without the level of its vmap."""

    def f(x: torch.Tensor, t: torch.Tensor) -> Any:
        def chosen(x: torch.Tensor) -> torch.Tensor:
            c = constant(x)
            factor: torch.Tensor = cond(x > 0, lambda y: c * 2 + y * 0, lambda y: c.sin(), x)
            return x * factor

        return tsfunc.jvp(chosen, (x,), (t,))

    x, t = torch.tensor([0.5, -0.25, 2.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double()
    want = [torch.stack(parts) for parts in zip(*map(f, x, t), strict=True)]
    for g in (vmap(f), specialize(vmap(f))):
        for got, expected in zip(g(x, t), want, strict=True):
            torch.testing.assert_close(got, expected)
