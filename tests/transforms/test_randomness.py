"""``randomness``: refused, a draw for each example, or one for all; nested, chunked, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
import torch.nn.functional as nnf
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc import specialize, vmap

X = torch.arange(1.0, 31.0).view(5, 6) / 31

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(6),
    "randn": lambda x: torch.randn(6),
    "randint": lambda x: torch.randint(1000, (6,)),
    "randperm": lambda x: torch.randperm(40),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(0.0, 1.0, (6,)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "new_empty, normal_": lambda x: x.new_empty(6).normal_(),
    "dropout": lambda x: nnf.dropout(x.new_ones(50)),
    "dropout of one from outside": lambda x: nnf.dropout(torch.ones(50)),
    "bernoulli": lambda x: torch.bernoulli(torch.full((50,), 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_randomness_error_refuses_draws(name: str) -> None:
    with pytest.raises(
        RuntimeError, match="vmap: called random operation while in randomness error mode"
    ):
        vmap(DRAWS[name])(X)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", DRAWS)
def test_randomness_different_draws_for_each_example(name: str, chunk_size: int | None) -> None:
    out = vmap(DRAWS[name], randomness="different", chunk_size=chunk_size)(X)
    for i in range(5):
        for j in range(i):
            assert not torch.equal(out[i], out[j])


LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rand_like": lambda x, p: torch.rand_like(x),
    "randn_like": lambda x, p: torch.randn_like(p),
    "normal_": lambda x, p: (x + p).normal_(),
    "bernoulli_": lambda x, p: (x + p).bernoulli_(p),
    "normal": torch.normal,
    "bernoulli": lambda x, p: torch.bernoulli(p),
    "poisson": lambda x, p: torch.poisson(p * 9),
    "binomial": lambda x, p: torch.binomial(torch.full_like(p, 9), p),
    "multinomial": lambda x, p: torch.multinomial(p, 9, True),
}


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, 1), (1, 0), (1, None), (None, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_does_not_decide(name: str, dims: tuple[int | None, int | None]) -> None:
    """The numbers are those of torch.func, for every batch dim."""
    values = [
        x[0] if d is None else x.movedim(0, d).clone() for x, d in zip((X, X), dims, strict=True)
    ]
    torch.manual_seed(0)
    want = torch.func.vmap(LAYOUTS[name], dims, randomness="different")(*values)
    torch.manual_seed(0)
    same(vmap(LAYOUTS[name], dims, randomness="different")(*values), want)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", DRAWS)
def test_randomness_same_draws_once(name: str, chunk_size: int | None) -> None:
    out = vmap(DRAWS[name], randomness="same", chunk_size=chunk_size)(X)
    assert (out == out[0]).all()
    assert (out != out.flatten()[0]).any()


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_the_seed_decides(randomness: str) -> None:
    draw = vmap(lambda x: torch.rand(4) + x.sum(), randomness=randomness)
    torch.manual_seed(3)
    one = draw(X)
    torch.manual_seed(3)
    same(draw(X), one)
    assert not torch.equal(draw(X), one)


@pytest.mark.parametrize(
    ("outer", "inner"), [("same", "same"), ("same", "different"), ("different", "same")]
)
def test_randomness_of_nested_vmaps(outer: str, inner: str) -> None:
    out = vmap(vmap(lambda x: torch.rand(()), randomness=inner), randomness=outer)(X)
    assert bool((out == out[:1]).all()) is (outer == "same")
    assert bool((out == out[:, :1]).all()) is (inner == "same")


def test_each_level_may_refuse() -> None:
    for outer, inner in (("error", "same"), ("same", "error"), ("error", "different")):
        with pytest.raises(RuntimeError, match="randomness error mode"):
            vmap(vmap(lambda x: torch.rand(()), randomness=inner), randomness=outer)(X)


def test_functions_that_draw_nothing_are_allowed() -> None:
    same(vmap(lambda x: nnf.dropout(x, training=False))(X), X)
    same(vmap(lambda x: torch.zeros(6) + x)(X), X)


def test_a_generator_is_used() -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.rand(6, generator=torch.Generator().manual_seed(1))

    out = vmap(draw, randomness="same")(X)
    same(out, torch.rand(6, generator=torch.Generator().manual_seed(1)).expand(5, 6))


def test_in_place_on_one_from_outside() -> None:
    w = torch.zeros(6)
    with pytest.raises(RuntimeError, match="Cannot ask for different inplace randomness on an unb"):
        vmap(lambda x: w.uniform_() + x, randomness="different")(X)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(lambda x: w.uniform_() + x)(X)
    same(w, torch.zeros(6))
    out = vmap(lambda x: w.uniform_() + 0 * x, randomness="same")(X)
    same(out, w.expand(5, 6))


@pytest.mark.parametrize("randomness", ["different", "split"])
def test_draws_into_tensors_made_inside(randomness: str) -> None:
    """The tensor becomes batched, and so do all its aliases."""

    def drawn(x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.empty(6)
        half = noise[3:]
        assert noise.normal_() is noise
        noise += x
        return noise, half

    noise, half = vmap(drawn, randomness=randomness)(X)
    assert torch.equal(noise[:, 3:], half)
    assert (noise - X).unique().numel() == 30
    torch.testing.assert_close((noise - X).std().item(), 1.0, atol=0.5, rtol=0)

    nested = vmap(
        vmap(lambda x: torch.empty(2).uniform_(), randomness=randomness), randomness=randomness
    )
    assert nested(X).unique().numel() == 60
    gradient = tsfunc.grad(lambda x: (x * torch.empty(6).exponential_()).sum())
    assert vmap(gradient, randomness=randomness)(X).unique().numel() == 30


def test_views_that_autograd_refuses_to_read_do_not_matter() -> None:
    """A write searches all tensors of the process for aliases."""
    base = torch.zeros(4)
    with torch.no_grad():
        stale = base[1:]
    base.mul_(torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        stale.is_leaf  # noqa: B018
    drawn = vmap(lambda x: torch.empty(3).uniform_() + 0 * x[0], randomness="different")(X)
    assert drawn.unique().numel() == 15


@pytest.mark.parametrize("randomness", ["different", "split"])
def test_functions_of_torch_that_draw_into_new_tensors(randomness: str) -> None:
    normal = torch.distributions.Normal(torch.zeros(6), 1.0)
    assert vmap(lambda x: normal.sample(), randomness=randomness)(X).unique().numel() == 30
    moved = vmap(lambda x: torch.distributions.Laplace(x, 1.0).rsample(), randomness=randomness)
    assert moved(X).shape == X.shape

    def initial(i: Tensor) -> dict[str, Tensor]:
        return dict(torch.nn.Linear(6, 2).named_parameters())

    models = vmap(initial, randomness=randomness)(torch.arange(5))
    assert models["weight"].unique().numel() == 60
    assert models["weight"].abs().max() <= 6**-0.5
    assert vmap(lambda x: torch.nn.Linear(6, 2)(x), randomness=randomness)(X).shape == (5, 2)
    outside = torch.nn.Linear(6, 2)
    with pytest.raises(RuntimeError, match="Cannot ask for different inplace randomness"):
        vmap(lambda x: torch.nn.init.normal_(outside.weight), randomness=randomness)(X)


def test_a_distribution_for_each_example() -> None:
    out: Any = vmap(lambda p: torch.bernoulli(p), randomness="different")(
        torch.tensor([0.0, 1.0])[:, None].expand(2, 50)
    )
    same(out, torch.tensor([0.0, 1.0])[:, None].expand(2, 50))
    assert vmap(lambda p: torch.multinomial(p, 2), randomness="different")(X).shape == (5, 2)


OUT: dict[str, Callable[[Tensor], Any]] = {
    "randn": lambda out: torch.randn(2, out=out),
    "rand": lambda out: torch.rand(2, out=out),
    "randint": lambda out: torch.randint(5, (2,), out=out),
    "randperm": lambda out: torch.randperm(2, out=out),
    "normal": lambda out: torch.normal(torch.zeros(2), 1.0, out=out),
    "bernoulli": lambda out: torch.bernoulli(torch.ones(2), out=out),
    "multinomial": lambda out: torch.multinomial(torch.ones(2), 2, out=out),
}


@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_out_is_refused(name: str, randomness: str) -> None:
    out = torch.zeros(2, dtype=torch.int64 if name in ("randperm", "multinomial") else None)
    with pytest.raises(RuntimeError, match="calling out variants of random functions is not supp"):
        tsfunc.vmap(lambda x: OUT[name](out), randomness=randomness)(torch.ones(3))
    assert not out.any()


def test_out_where_no_vmap_is_active() -> None:
    """Levels of other transforms leave it to torch."""
    out, x = torch.zeros(2), torch.ones(2)

    def func(x: Tensor) -> Tensor:
        return x * torch.randn(2, out=out)

    def pushed(x: Tensor) -> Tensor:
        return tsfunc.jvp(func, (x,), (x,))[1]

    torch.manual_seed(0)
    want = torch.randn(2)
    torch.manual_seed(0)
    torch.testing.assert_close(tsfunc.jvp(pushed, (x,), (x,))[0], want)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    "draw",
    [
        torch.poisson,
        torch.bernoulli,
        lambda p: torch.binomial(40 * torch.ones(6), p),
        lambda p: torch.distributions.Gamma(p, 1.0).sample(),
        torch._sample_dirichlet,
        lambda p: torch.multinomial(p, 3),
        lambda p: torch.normal(p, p),
        lambda p: torch.zeros(6).bernoulli_(p),
        lambda p: torch.bernoulli(p, 0.5),
    ],
    ids="poisson bernoulli binomial gamma dirichlet multinomial normal bernoulli_ p".split(),
)
def test_one_draw_for_distributions_that_differ(draw: Callable[[Tensor], Tensor]) -> None:
    """The refusal has torch.func's words; a shared distribution is drawn from once."""
    p = X + 0.2
    for T in (tsfunc, torch.func):
        with pytest.raises(RuntimeError, match="not currently support same randomness with a batc"):
            T.vmap(draw, randomness="same")(p)
        out = T.vmap(lambda x: draw(p[0]) + 0 * x[0], randomness="same")(X)
        same(out, out[:1].expand_as(out))


def test_chances_of_each_example_for_one_tensor_from_outside() -> None:
    """The error about randomness comes before the error about a shared output tensor."""
    w = torch.zeros(6)
    for T in (tsfunc, torch.func):
        with pytest.raises(RuntimeError, match="not currently support same randomness with a batc"):
            T.vmap(lambda p: w.bernoulli_(p), randomness="same")(X)
        with pytest.raises(RuntimeError, match="randomness error mode"):
            T.vmap(lambda p: w.bernoulli_(p))(X)
        with pytest.raises(RuntimeError, match="has more elements than `self`"):
            T.vmap(lambda p: w.bernoulli_(p), randomness="different")(X)
    same(w, torch.zeros(6))


@pytest.mark.parametrize("randomness", ["different", "split"])
def test_out_of_each_example(randomness: str) -> None:
    """Batched output tensors receive the draws of each example."""

    def draw(x: Tensor) -> tuple[Tensor, ...]:
        out = torch.zeros_like(x)
        places = torch.zeros_like(x[:3], dtype=torch.int64)
        return (
            torch.randn(6, out=out.clone()),
            torch.rand(6, out=out.clone()),
            torch.normal(x, 1.0, out=out.clone()),
            torch.multinomial(x, 3, out=places),
        )

    for out in tsfunc.vmap(draw, randomness=randomness)(X + 0.1):
        assert len(out.unique(dim=0)) > 2
    with pytest.raises(RuntimeError, match="randomness error mode"):
        tsfunc.vmap(draw)(X)


@pytest.mark.parametrize("randomness", ["different", "split"])
def test_bounds_of_each_example(randomness: str) -> None:
    draw: Callable[..., Tensor] = torch.randint_like  # ``vmap`` has its first overload only
    high = torch.tensor([1, 2, 1 << 40])
    x = torch.zeros(3, 200, dtype=torch.int64)
    out = vmap(draw, randomness=randomness)(x, high)
    assert not out[0].any()
    assert out[1].unique().tolist() == [0, 1]
    assert out[2].unique().numel() == 200 and int(out[2].max()) > 1 << 38
    shared = vmap(draw, (0, None), randomness=randomness)(x, high[1])
    assert shared.unique().tolist() == [0, 1] and len(shared.unique(dim=0)) == 3
    drawn = vmap(lambda h: torch.randint_like(x[0], h), randomness=randomness)(high)
    assert drawn.shape == (3, 200) and bool((drawn < high[:, None]).all())
    with pytest.raises(RuntimeError, match="from=0 >= to=-1"):  # the first example's error
        vmap(draw, randomness=randomness)(x, -high)
    with pytest.raises(RuntimeError, match="a high above 0"):
        vmap(draw, randomness=randomness)(x, high * torch.tensor([1, 1, -1]))
    with pytest.raises(RuntimeError, match="same randomness with a batched"):
        vmap(draw, randomness="same")(x, high)


@pytest.mark.parametrize(
    "dropout", [nnf.dropout, lambda x: nnf.alpha_dropout(x, training=True), nnf.dropout2d]
)
def test_one_mask_for_all_of_nested_batches(dropout: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3, 2, 1, 9, 5, 5)
    outer = vmap(vmap(dropout, randomness="different"), randomness="same")(x)
    same(outer, outer[:1].expand(x.shape))
    assert not torch.equal(outer[:, 0], outer[:, 1])
    both = vmap(vmap(dropout, randomness="same"), randomness="same")(x)
    same(both, both[:1, :1].expand(x.shape))


def test_under_grad() -> None:
    """The same mask in the forward and the backward pass."""

    def func(x: Tensor) -> Tensor:
        return nnf.dropout(x, 0.5).sum()

    for randomness in ("different", "same"):
        grads = vmap(tsfunc.grad(func), randomness=randomness)(torch.ones(5, 200))
        assert set(grads.unique().tolist()) == {0.0, 2.0}
        assert bool((grads == grads[0]).all()) is (randomness == "same")


def test_outside_of_vmap_nothing_is_refused() -> None:
    assert tsfunc.grad(lambda x: (x * torch.rand(6)).sum())(X[0]).shape == (6,)
    assert tsfunc.jvp(lambda x: x * torch.rand(6), (X[0],), (X[0],))[1].shape == (6,)


@pytest.mark.parametrize("mode", ["different", "split"])
def test_tensors_made_in_a_trace_get_numbers_in_place(mode: Any) -> None:
    def drawn(x: Tensor) -> Tensor:
        made = torch.zeros(3)
        view = made[1:]
        view.uniform_()
        return x * made

    call = vmap(drawn, randomness=mode)
    for f in (call, specialize(call), vmap(specialize(drawn), randomness=mode)):
        out = f(torch.ones(4))
        assert out[:, 0].eq(0).all()
        assert len(out[:, 1:].unique()) == 8


OFF: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: torch.dropout(x, 0.3, False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.3, False),
    "feature_dropout": lambda x: torch.feature_dropout(x.view(1, 3), 0.3, False).view(3),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, 0.1, 0.3, False),
}


@pytest.mark.parametrize("name", OFF)
def test_derivatives_inside_of_vmap_of_layers_that_are_not_in_training(name: str) -> None:
    """Without batched arguments they record their graph like any operator."""
    f, cotangents = OFF[name], torch.eye(3, dtype=torch.float64)
    leaf = torch.tensor([-0.5, 0.3, 0.7], dtype=torch.float64, requires_grad=True)
    slope = torch.where(leaf < 0, 0.2, 1.0) if name == "rrelu" else torch.ones_like(leaf)
    expected = (slope * f(leaf).cos()).detach().diag()

    def inside(cotangent: Tensor) -> Tensor:
        x = leaf.view_as(leaf)
        return torch.autograd.grad(f(x).sin(), x, cotangent)[0]

    torch.testing.assert_close(vmap(inside)(cotangents), expected)
