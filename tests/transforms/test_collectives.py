"""Collectives over named axes agree with NumPy on whole batches, and with their transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import (
    all_gather,
    axis_index,
    axis_size,
    cond,
    grad,
    jvp,
    pmax,
    psum,
    specialize,
    vmap,
    while_loop,
)

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
SQUARE = torch.linspace(-1, 2, 48, dtype=torch.float64).reshape(4, 4, 3)


def over(f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return vmap(f, axis_name="i", **kwargs)


# Each collective as a function of the batch, with the expected value of each example.
CASES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "psum": (lambda x: tsfunc.psum(x, "i"), lambda x: x.sum(0).expand(x.shape)),
    "pmean": (lambda x: tsfunc.pmean(x, "i"), lambda x: x.mean(0).expand(x.shape)),
    "pmax": (lambda x: tsfunc.pmax(x, "i"), lambda x: x.amax(0).expand(x.shape)),
    "pmin": (lambda x: tsfunc.pmin(x, "i"), lambda x: x.amin(0).expand(x.shape)),
    "all_gather": (lambda x: tsfunc.all_gather(x, "i"), lambda x: x.expand(4, *x.shape)),
    "all_gather at the end": (
        lambda x: tsfunc.all_gather(x, "i", axis=-1),
        lambda x: x.movedim(0, -1).expand(4, *x.movedim(0, -1).shape),
    ),
    "all_gather tiled": (
        lambda x: tsfunc.all_gather(x, "i", tiled=True),
        lambda x: x.flatten(0, 1).expand(4, *x.flatten(0, 1).shape),
    ),
    "psum_scatter": (lambda x: tsfunc.psum_scatter(x, "i"), lambda x: x.sum(0)),
    "psum_scatter tiled": (
        lambda x: tsfunc.psum_scatter(torch.cat([x, 2 * x]), "i", tiled=True),
        lambda x: torch.cat([x, 2 * x], 1).sum(0).unflatten(0, (4, 2)),
    ),
    "all_to_all": (lambda x: tsfunc.all_to_all(x, "i", 0, 0), lambda x: x.transpose(0, 1)),
    "all_to_all to the end": (
        lambda x: tsfunc.all_to_all(x, "i", 0, 1),
        lambda x: x.transpose(0, 1).transpose(1, 2),
    ),
    "all_to_all tiled": (
        lambda x: tsfunc.all_to_all(torch.cat([x, 2 * x]), "i", 0, 1, tiled=True),
        lambda x: torch.stack(
            [
                torch.cat([torch.cat([one, 2 * one])[2 * j : 2 * j + 2] for one in x], 1)
                for j in range(4)
            ]
        ),
    ),
    "ppermute": (
        lambda x: tsfunc.ppermute(x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        lambda x: x.roll(1, 0),
    ),
    "ppermute of some": (
        lambda x: tsfunc.ppermute(x, "i", [(3, 0)]),
        lambda x: torch.cat([x[3:], torch.zeros_like(x[:3])]),
    ),
    "axis_index": (
        lambda x: x * tsfunc.axis_index("i"),
        lambda x: x * torch.arange(4).view(4, 1, 1),
    ),
    "axis_size": (lambda x: x * tsfunc.axis_size("i"), lambda x: x * 4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrapped", [lambda f: f, specialize], ids=["eager", "specialize"])
def test_the_input_of_each_example(name: str, wrapped: Any) -> None:
    ours, whole = CASES[name]
    torch.testing.assert_close(wrapped(over(ours))(SQUARE), whole(SQUARE))


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_tangents_through_it_are_those_of_the_whole(name: str) -> None:
    ours, whole = CASES[name]
    weights = whole(SQUARE).cos()

    def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        return lambda x: (f(x) * weights).sum()

    torch.testing.assert_close(grad(loss(over(ours)))(SQUARE), grad(loss(whole))(SQUARE))
    tangent = SQUARE.sin()
    torch.testing.assert_close(
        jvp(over(ours), (SQUARE,), (tangent,))[1], jvp(whole, (SQUARE,), (tangent,))[1]
    )
    torch.testing.assert_close(
        over(lambda x, t: jvp(ours, (x,), (t,))[1])(SQUARE, tangent),
        jvp(whole, (SQUARE,), (tangent,))[1],
    )


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("pmax", "pmin")])
def test_the_gradient_inside_of_the_axis_is_the_transpose(name: str) -> None:
    """Each example pulls back the dependence of all examples' results on its own input."""
    ours, whole = CASES[name]
    weights = whole(SQUARE).cos()

    def loss(x: Tensor, w: Tensor) -> Any:
        return (ours(x) * w).sum()

    expected = grad(lambda x: (whole(x) * weights).sum())(SQUARE)
    torch.testing.assert_close(over(grad(loss))(SQUARE, weights), expected)
    torch.testing.assert_close(specialize(over(grad(loss)))(SQUARE, weights), expected)


def test_names_of_nested_axes() -> None:
    def f(x: Tensor) -> Any:
        sums = tsfunc.psum(x, "j"), tsfunc.psum(x, "i"), tsfunc.psum(x, ("i", "j"))
        return *sums, tsfunc.axis_index("i") * 10 + tsfunc.axis_index("j")

    rows, columns, everything, index = over(vmap(f, axis_name="j"))(X)
    torch.testing.assert_close(rows, X.sum(1, keepdim=True).expand(4, 3))
    torch.testing.assert_close(columns, X.sum(0).expand(4, 3))
    torch.testing.assert_close(everything, X.sum().expand(4, 3))
    assert index.tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]]

    def g(x: Tensor) -> Any:
        return tsfunc.psum(x * x, ("i", "j")) * x

    found = over(vmap(grad(g), axis_name="j"))(X)
    torch.testing.assert_close(found, (X**2).sum() + 2 * X * X.sum())


def test_pytrees_and_numbers() -> None:
    out = over(lambda x: tsfunc.psum({"x": (x, 1), "y": [2.5]}, "i"))(X)
    torch.testing.assert_close(out["x"][0], X.sum(0).expand(4, 3))
    assert out["x"][1] == 4 and out["y"] == [10.0]


def test_a_specialized_function_inside_of_the_axis() -> None:
    f = specialize(lambda x: x / tsfunc.psum(x, "i"))
    for _ in range(2):
        torch.testing.assert_close(over(f)(X), X / X.sum(0))


def test_a_batch_norm_synchronised_over_the_axis_is_that_of_the_whole_batch() -> None:
    def norm(x: Tensor) -> Any:
        mean = tsfunc.pmean(x.mean(0), "i")
        variance = tsfunc.pmean(((x - mean) ** 2).mean(0), "i")
        return (x - mean) / (variance + 1e-5).sqrt()

    expected = torch.nn.functional.batch_norm(SQUARE.flatten(0, 1), None, None, training=True)
    torch.testing.assert_close(over(norm)(SQUARE).flatten(0, 1), expected)
    weights = SQUARE.cos()

    def whole(x: Tensor) -> Tensor:
        y = torch.nn.functional.batch_norm(x.flatten(0, 1), None, None, training=True)
        return (y.view_as(x) * weights).sum()

    found = over(grad(lambda x, w: (norm(x) * w).sum()))(SQUARE, weights)
    torch.testing.assert_close(found, grad(whole)(SQUARE))


def test_an_unbound_name_is_an_error_that_lists_the_bound_ones() -> None:
    with pytest.raises(NameError, match=r"psum: unbound axis name: 'k'.*bound here: none"):
        tsfunc.psum(X, "k")
    with pytest.raises(tsfunc.errors.UnboundAxisError, match="bound here: 'i', 'j'"):
        over(vmap(lambda x: tsfunc.pmean(x, "k"), axis_name="j"))(X)
    with pytest.raises(NameError, match=r"Bind one with vmap\(f, axis_name='i'\)"):
        specialize(lambda x: tsfunc.axis_size("i"))(X)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected each destination to be an example's number"):
        over(lambda x: tsfunc.ppermute(x, "i", [(0, 1), (2, 1)]))(X)
    with pytest.raises(ValueError, match="expected each source to be an example's number"):
        over(lambda x: tsfunc.ppermute(x, "i", [(7, 1)]))(X)
    with pytest.raises(ValueError, match=r"the size of dim 0: expected 4.*of shape \(3,\)"):
        over(lambda x: tsfunc.psum_scatter(x, "i"))(X)
    with pytest.raises(ValueError, match="the size of dim 0: expected a multiple of 4"):
        over(lambda x: tsfunc.all_to_all(x, "i", 0, 0, tiled=True))(X)
    with pytest.raises(ValueError, match=r"a dim of a tensor of shape \(3,\), got 2"):
        over(lambda x: tsfunc.all_gather(x, "i", axis=2))(X)
    with pytest.raises(TypeError, match=r"all_gather: expected tensors.*got str"):
        over(lambda x: tsfunc.all_gather("1", "i"))(X)
    with pytest.raises(ValueError, match=r"chunk_size= runs some examples at a time"):
        over(torch.sin, chunk_size=2)
    with pytest.raises(ValueError, match=r"data_dependent=.split. runs some examples"):
        over(torch.sin, data_dependent="split")


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_a_branch_that_exchanges_values_runs_on_all_examples(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(x > 0, lambda: tsfunc.psum(x * x, "i"), lambda: -x)

    def selected(x: torch.Tensor) -> Any:
        return torch.where(x > 0, tsfunc.psum(x * x, "i"), -x)

    for values in ([1.0, -1.0, 2.0], [1.0, 3.0, 2.0], [-1.0, -2.0, -3.0]):
        x = torch.tensor(values)
        torch.testing.assert_close(wrap(over(f))(x), over(selected)(x))
        torch.testing.assert_close(wrap(over(grad(f)))(x), over(grad(selected))(x))
    nested = over(lambda x: cond(x < 5, lambda: f(x), lambda: x))
    x = torch.tensor([1.0, -1.0, 6.0])
    torch.testing.assert_close(wrap(nested)(x), torch.tensor([38.0, 1.0, 6.0]))


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_a_loop_that_exchanges_values_runs_on_all_examples(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        # Examples that have ended contribute their last value.
        return while_loop(lambda c: c < 10, lambda c: c + tsfunc.pmax(c, "i"), x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        while (x < 10).any():
            x = torch.where(x < 10, x + x.max(), x)
        return x

    x = torch.tensor([1.0, 2.0, 3.5])
    torch.testing.assert_close(wrap(over(f))(x), plain(x))


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_an_example_knows_its_number_wherever_it_runs(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        up = while_loop(lambda c: c < tsfunc.axis_index("i"), lambda c: c + 2, x)
        return cond(up > 2, lambda: up * tsfunc.axis_size("i"), lambda: tsfunc.axis_index("i"))

    x = torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(wrap(over(f))(x), torch.tensor([0, 1, 2, 16]))


def test_numbers_are_exchanged_as_tensors() -> None:
    def f(x: Tensor) -> Any:
        return tsfunc.all_gather(2.5, "i"), tsfunc.ppermute(3, "i", [(0, 1)])

    gathered, sent = vmap(f, axis_name="i")(torch.ones(2))
    assert gathered.tolist() == [[2.5, 2.5], [2.5, 2.5]]
    assert sent.tolist() == [0, 3]


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_a_loop_sends_values_round(wrap: Any) -> None:
    ring = [(0, 1), (1, 2), (2, 0)]

    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        sent = tsfunc.ppermute(carry, "i", ring) * row
        return sent, tsfunc.psum(carry, "i")

    x, rows = torch.randn(3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    mapped = vmap(lambda x, row: tsfunc.scan(step, x, row), axis_name="i")
    expected, sums = x, []
    for k in range(4):
        sums.append(expected.sum())
        expected = expected.roll(1) * rows[:, k]
    last, found = wrap(mapped)(x, rows)
    torch.testing.assert_close(last, expected)
    torch.testing.assert_close(found, torch.stack(sums).expand(3, 4))
    slope = wrap(grad(lambda x: mapped(x, rows)[0].sum()))(x)
    back = torch.ones_like(x)
    for k in reversed(range(4)):
        back = (back * rows[:, k]).roll(-1)
    torch.testing.assert_close(slope, back)


@tsfunc.custom_vjp
def _scaled_by_all(x: Tensor) -> Any:
    return x * tsfunc.psum(x, "i")


_scaled_by_all.defvjp(
    lambda x: (_scaled_by_all.func(x), x),
    lambda x, ct: (ct * tsfunc.psum(x, "i") + tsfunc.psum(ct * x, "i"),),
)


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_a_rule_of_ones_own_may_exchange_values(wrap: Any) -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    plain = lambda x: (x * x.sum(0)).sin().sum()  # noqa: E731
    inside = vmap(grad(lambda x: _scaled_by_all(x).sin().sum()), axis_name="i")
    outside = grad(lambda x: vmap(_scaled_by_all, axis_name="i")(x).sin().sum())
    torch.testing.assert_close(wrap(inside)(x), grad(plain)(x))
    torch.testing.assert_close(wrap(outside)(x), grad(plain)(x))


class _AboveMean(torch.autograd.Function):
    """A function that torch's generated rule maps, at a level of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x - tsfunc.pmean(x, "i") * tsfunc.axis_size("i") + tsfunc.axis_index("i")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return ct - tsfunc.psum(ct, "i")


def test_a_function_of_torchs_may_exchange_values() -> None:
    x = torch.randn(3, dtype=torch.float64)
    apply: Any = _AboveMean.apply
    mapped = vmap(apply, axis_name="i")
    torch.testing.assert_close(mapped(x), x - x.sum() + torch.arange(3))
    branch = vmap(lambda x: cond(x > x.floor() + 0.5, apply, torch.neg, x), axis_name="i")
    taken = x > x.floor() + 0.5
    torch.testing.assert_close(branch(x), torch.where(taken, x - x.sum() + torch.arange(3), -x))
    torch.testing.assert_close(
        vmap(grad(lambda x: apply(x).sin()), axis_name="i")(x),
        grad(lambda x: (x - x.sum() + torch.arange(3)).sin().sum())(x),
    )


@pytest.mark.parametrize("run", [lambda f: f, specialize], ids=["eager", "specialize"])
def test_collectives_over_two_axes_are_those_over_the_examples_of_both(run: Any) -> None:
    x = torch.linspace(-1, 2, 144, dtype=torch.float64).view(2, 3, 12, 2)

    def over(f: Any, names: Any) -> Any:
        if isinstance(names, str):
            return run(vmap(f, axis_name=names))(x.flatten(0, 1))
        inner = vmap(f, axis_name=names[1])
        out = run(vmap(inner, axis_name=names[0]))(x)
        return tsfunc.pytrees.tree_map(lambda t: t.flatten(0, 1), out)

    exchange: list[Callable[[Tensor, Any], Any]] = [
        lambda x, name: tsfunc.psum_scatter(x[:6], name),
        lambda x, name: tsfunc.psum_scatter(x, name, tiled=True),
        lambda x, name: tsfunc.psum_scatter(x.T, name, scatter_dimension=-1, tiled=True),
        lambda x, name: tsfunc.all_to_all(x[:6], name, 0, 1),
        lambda x, name: tsfunc.all_to_all(x.T[:, :6], name, 1, -2),
        lambda x, name: tsfunc.all_to_all(x, name, 0, 1, tiled=True),
        lambda x, name: tsfunc.all_to_all(x.T, name, -1, 1, tiled=True),
        lambda x, name: tsfunc.ppermute(x, name, [(0, 5), (1, 3), (5, 0), (3, 1)]),
        lambda x, name: tsfunc.ppermute(axis_index(name), name, [(i, 5 - i) for i in range(6)]),
    ]

    for f in (
        lambda x, name: all_gather(x, name),
        lambda x, name: all_gather(x, name, axis=1),
        lambda x, name: all_gather(x, name, tiled=True),
        lambda x, name: x * axis_index(name) + axis_size(name),
        lambda x, name: psum(x, name) + pmax(x, name),
        lambda x, name: grad(lambda x: (all_gather(x, name).cumsum(0) * x).sum())(x),
        *exchange,
        *(
            lambda x, name, f=f: grad(lambda x: (f(x, name) ** 2 + x.sum()).cumsum(0).sum())(x)
            for f in exchange
        ),
        *(lambda x, name, f=f: jvp(lambda x: f(x, name) ** 2, (x,), (x.sin(),)) for f in exchange),
    ):
        expected = over(lambda x, f=f: f(x, "i"), "i")
        both = over(lambda x, f=f: f(x, ["a", "b"]), ("a", "b"))
        torch.testing.assert_close(both, expected)


def test_sizes_that_do_not_fit_several_axes_are_refused_by_all_their_names() -> None:
    with pytest.raises(ValueError, match=r"expected 12, the product of .* 'a' and 'b', got .*\(4,"):
        vmap(vmap(lambda x: tsfunc.psum_scatter(x, ("a", "b")), axis_name="b"), axis_name="a")(
            torch.ones(3, 4, 4)
        )


def test_none_among_the_values_stays() -> None:
    found = vmap(lambda x: psum({"x": x, "none": None}, "i"), axis_name="i")(torch.ones(3))
    assert found["x"].tolist() == [3, 3, 3] and found["none"] is None


def test_a_choice_by_an_inner_example_that_differs_along_the_axis() -> None:
    x = torch.linspace(-1.0, 2.0, 6).view(2, 3)

    def chosen(v: Tensor) -> Tensor:
        return cond(v > 0, lambda v: v * psum(v.sin(), "i"), lambda v: psum(v, "i"), v)

    def looped(v: Tensor) -> Tensor:
        def step(v: Tensor) -> Tensor:
            return v + 1 + psum(v.sin(), "i").abs()

        return while_loop(lambda v: v < 4, step, v)

    want = torch.where(x > 0, x * x.sin().sum(0), x.sum(0).expand(2, 3))
    torch.testing.assert_close(vmap(vmap(chosen), axis_name="i")(x), want)
    now, steps = x, 0
    while bool((now < 4).any()):
        now = torch.where(now < 4, now + 1 + now.sin().sum(0).abs(), now)
        steps += 1
    assert steps > 1
    torch.testing.assert_close(vmap(vmap(looped), axis_name="i")(x), now)
