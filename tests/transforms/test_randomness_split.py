"""``randomness="split"``: an example's numbers follow from the seed and its index alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tsfunc
from tests.transforms.support import same
from tsfunc import vmap

X = torch.linspace(0.05, 0.95, 42).view(7, 6)
# Any, because ``vmap`` has the first overload only of an overloaded function of torch.
drawing: Any = functools.partial(vmap, randomness="split")

Func = Callable[[Tensor], Any]


def attend(x: Tensor) -> Tensor:
    return nnf.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def combined(x: Tensor) -> Tensor:
    """Draw before, at each combination, and after."""
    first = torch.rand(())
    done = tsfunc.associative_scan(lambda a, b: a + b + torch.rand(()), x)
    return first + done + torch.rand(())


DRAWS: dict[str, Func] = {
    "rand": lambda x: torch.rand(6),
    "rand of doubles": lambda x: torch.rand(2, 3, dtype=torch.float64),
    "rand of halves": lambda x: torch.rand(9, dtype=torch.float16),
    "complex": lambda x: torch.randn(3, dtype=torch.complex64),
    "randn": lambda x: torch.randn(5),
    "randint": lambda x: torch.randint(1000, (6,)),
    "randint between": lambda x: torch.randint(-5, 5, (2, 2)),
    "randperm": lambda x: torch.randperm(40),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randint_like between": lambda x: torch.randint_like(x, 50, 100),
    "normal": lambda x: torch.normal(2.0, 3.0, (6,)),
    "normal of tensors": lambda x: torch.normal(x, x),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(1.0, x),
    "bernoulli": lambda x: torch.bernoulli(x.repeat(4)),
    "bernoulli of one from outside": lambda x: torch.bernoulli(torch.full((50,), 0.5)),
    "bernoulli with p": lambda x: torch.bernoulli(x.repeat(4), 0.3),
    "multinomial": lambda x: torch.multinomial(x, 4),
    "multinomial of rows": lambda x: torch.multinomial(x.expand(3, 6), 9, True),
    "poisson": lambda x: torch.poisson(x * 50),
    "binomial": lambda x: torch.binomial(torch.full((6,), 60.0), x),
    "gamma": lambda x: torch.distributions.Gamma(x, 1.0).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "beta": lambda x: torch.distributions.Beta(x, 1 + x).sample(),
    "categorical": lambda x: torch.distributions.Categorical(x).sample((20,)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 5),
    "normal_": lambda x: x.new_empty(6).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x.repeat(4)).geometric_(0.1),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ to": lambda x: x.long().random_(100),
    "random_ from": lambda x: x.long().random_(-(1 << 63), None),
    "bernoulli_": lambda x: x.repeat(4).bernoulli_(x.repeat(4)),
    "bernoulli_ with p": lambda x: x.repeat(4).bernoulli_(0.5),
    "dropout": lambda x: nnf.dropout(x.repeat(8)),
    "dropout of one from outside": lambda x: nnf.dropout(torch.ones(50)),
    "alpha_dropout": lambda x: nnf.alpha_dropout(x.repeat(4), training=True),
    "dropout2d": lambda x: nnf.dropout2d(x.new_ones(1, 30, 2, 2)),
    "feature_alpha_dropout": lambda x: nnf.feature_alpha_dropout(
        x.new_ones(1, 30, 3), training=True
    ),
    "rrelu": lambda x: nnf.rrelu(-x, training=True),
    "gumbel_softmax": lambda x: nnf.gumbel_softmax(x),
    "attention": lambda x: attend(x.view(1, 6, 1).expand(2, 6, 4)),
    "several": lambda x: torch.cat([torch.rand(2), torch.rand(2), torch.randn(3)]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_an_examples_numbers_are_its_own(name: str) -> None:
    """They are equal in a smaller batch, in chunks, and among other examples; indices differ."""
    draw = DRAWS[name]
    torch.manual_seed(2)
    whole = drawing(draw)(X)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    example = draw(X[0])
    assert whole.shape[1:] == example.shape and whole.dtype is example.dtype
    assert len({str(row.tolist()) for row in whole}) == 7
    torch.manual_seed(2)
    same(drawing(draw)(X[:3]), whole[:3])
    for chunk_size in (1, 3):
        torch.manual_seed(2)
        same(drawing(draw, chunk_size=chunk_size)(X), whole)
        assert torch.equal(torch.get_rng_state(), after)
    others = X.clone()
    others[1::2] = X[1::2].flip(1)
    torch.manual_seed(2)
    same(drawing(draw)(others)[::2], whole[::2])
    torch.manual_seed(2)
    same(drawing(draw, in_dims=1, out_dims=1)(X.T), whole.movedim(0, 1))
    assert not torch.equal(drawing(draw)(X), whole)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.3), nn.Tanh()),
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 40), nn.RReLU()),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(0, (3, 2)), nn.TransformerEncoderLayer(2, 1, 8, dropout=0.4)
    ),
    "lstm": lambda: FirstResult(nn.LSTM(2, 5, num_layers=2, dropout=0.5)),
    "gru": lambda: FirstResult(nn.GRU(2, 5, num_layers=2, dropout=0.5, bidirectional=True)),
    "rnn": lambda: FirstResult(nn.RNN(2, 5, num_layers=3, dropout=0.5)),
}


class FirstResult(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(3, 2))[0]


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_training(name: str) -> None:
    net = MODULES[name]()
    torch.manual_seed(3)
    whole = drawing(net)(X)
    torch.manual_seed(3)
    same(drawing(net, chunk_size=2)(X), whole)
    one = X[:1].expand(5, 6)
    torch.manual_seed(3)
    rows = drawing(net)(one)
    assert len({str(row.tolist()) for row in rows}) == 5
    torch.manual_seed(3)
    same(rows[0], drawing(net)(X[:1])[0])


@given(sizes=st.tuples(st.integers(1, 4), st.integers(1, 5)), inner=st.sampled_from([None, 2]))
def test_split_keys_follow_from_both_indices(sizes: tuple[int, int], inner: int | None) -> None:
    """Keys follow from both indices."""

    def draw(x: Tensor) -> Tensor:
        return torch.rand(3) + 0 * x

    torch.manual_seed(4)
    want = drawing(drawing(draw))(torch.zeros(5, 6))
    assert len(want.unique()) == 90
    torch.manual_seed(4)
    got = drawing(drawing(draw, chunk_size=inner))(torch.zeros(sizes))
    same(got, want[: sizes[0], : sizes[1]])


@pytest.mark.parametrize("outer", ["same", "different", "split"])
@pytest.mark.parametrize("inner", ["same", "different", "split"])
def test_beside_other_kinds(outer: str, inner: str) -> None:
    func = vmap(vmap(lambda x: torch.rand(()), randomness=inner), randomness=outer)
    out = func(torch.zeros(4, 5))
    assert bool((out == out[:1]).all()) is (outer == "same")
    assert bool((out == out[:, :1]).all()) is (inner == "same")
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(vmap(lambda x: torch.rand(()), randomness=inner))(torch.zeros(4, 5))


def test_a_generator_is_used() -> None:
    def draw(generator: torch.Generator, chunk_size: int | None = None) -> Tensor:
        return drawing(
            lambda x: torch.rand(6, generator=generator) + torch.rand(6, generator=generator),
            chunk_size=chunk_size,
        )(X)

    generator = torch.Generator().manual_seed(1)
    one, two = draw(generator), draw(generator)
    assert not torch.equal(one, two)
    again = torch.Generator().manual_seed(1)
    same(draw(again, 2), one)
    same(draw(again), two)


@pytest.mark.parametrize("draw", [torch.rand_like, torch.sin])
def test_a_call_draws_one_key(draw: Func) -> None:
    """Functions, chunks and programs leave the generator in the same state."""
    torch.manual_seed(1)
    torch.randint(0, 1 << 32, (2,))
    after = torch.get_rng_state()
    whole = tsfunc.specialize(drawing(draw))
    whole(X)
    for func in (drawing(draw), drawing(draw, chunk_size=3), whole):
        torch.manual_seed(1)
        func(X)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_vmap_without_random_numbers_may_have_one_of_them_inside() -> None:
    x = torch.ones(2, 3)
    same(vmap(drawing(torch.sin))(x), x.sin())
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(drawing(torch.rand_like))(x)


@pytest.mark.parametrize("inner", ["split", "same", "different"])
def test_operators_called_by_overload_draw_for_every_vmap_in_a_program(inner: str) -> None:
    def func(x: Tensor) -> Any:
        one = vmap(lambda y: torch.ops.aten.bernoulli.p(torch.ones(40), 0.5) + y, randomness=inner)
        return one(torch.zeros(2)) + x

    x = torch.zeros(3)
    torch.manual_seed(1)
    whole = drawing(func)(x)
    torch.manual_seed(1)
    same(tsfunc.specialize(drawing(func))(x), whole)
    assert len({str(row.tolist()) for row in whole}) == 3


def test_generators_of_nested_vmaps_in_branches() -> None:
    """The first draw is in a branch of one outer vmap."""

    def func(x: Tensor, generator: torch.Generator) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            y = tsfunc.cond(x > 0, lambda y: y + torch.rand((), generator=generator), torch.neg, y)
            return y + torch.rand((), generator=generator) + torch.rand(())

        return drawing(inner)(torch.zeros(2)) + torch.rand((), generator=generator)

    def draw(**options: Any) -> Any:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(2)
        return drawing(lambda x: func(x, generator), **options)(torch.tensor([-1.0, 1.0, 2.0]))

    whole = draw()
    assert len(whole.unique()) == 6
    same(draw(chunk_size=1), whole)


def test_under_grad() -> None:
    """The forward and the backward pass have one mask, for any order of transforms."""

    def func(x: Tensor) -> Tensor:
        return nnf.dropout(x, 0.5).sum()

    x = torch.ones(5, 200)
    torch.manual_seed(5)
    grads = drawing(tsfunc.grad(func))(x)
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(5)
    same(tsfunc.grad(lambda x: drawing(func)(x).sum())(x), grads)
    torch.manual_seed(5)
    same(drawing(tsfunc.grad(func), chunk_size=2)(x), grads)
    torch.manual_seed(5)
    same(drawing(lambda x: tsfunc.jvp(func, (x,), (x,))[1])(x), grads.sum(1))


def test_checkpoints_draw_the_same_again() -> None:
    def func(x: Tensor) -> Tensor:
        y = checkpoint(lambda x: nnf.dropout(x, 0.5).square(), x, use_reentrant=False)
        return y.sum()

    grads = drawing(tsfunc.grad(func))(torch.ones(5, 200))
    assert set(grads.unique().tolist()) == {0.0, 8.0}


def test_gradients_by_parameters_of_distributions() -> None:
    def func(a: Tensor) -> Tensor:
        return torch.distributions.Gamma(a, 1.0).rsample((2000,)).mean()

    alphas = torch.tensor([0.7, 2.0, 5.0])
    for transformed in (
        drawing(tsfunc.grad(func)),
        tsfunc.grad(lambda a: drawing(func)(a).sum()),
    ):
        same(transformed(alphas), torch.ones(3), atol=0.15, rtol=0)
    for draw in (torch.poisson, torch.bernoulli, lambda p: torch.normal(p, p)):
        leaf = X.clone().requires_grad_()
        drawing(draw)(leaf).sum().backward()
        same(leaf.grad, torch.zeros_like(X))


def test_examples_that_part_keep_their_numbers() -> None:
    def func(x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return torch.rand(3) + x
        return -torch.rand(3) - x

    torch.manual_seed(6)
    whole = drawing(func, data_dependent="split")(torch.zeros(20))
    torch.manual_seed(6)
    same(drawing(func, data_dependent="split", chunk_size=3)(torch.zeros(20)), whole)
    torch.manual_seed(6)
    same(drawing(func, data_dependent="split")(torch.zeros(6)), whole[:6])
    assert len(whole.abs().unique()) == 60


def test_nested_tensors() -> None:
    examples = [torch.zeros(n) for n in (3, 1, 3, 2)]
    torch.manual_seed(7)
    got = drawing(torch.rand_like)(torch.nested.as_nested_tensor(examples, layout=torch.jagged))
    torch.manual_seed(7)
    dense = drawing(lambda x: torch.rand(3))(torch.zeros(4))
    for g, d, x in zip(got.unbind(), dense, examples, strict=True):
        if len(x) == 3:
            same(g, d)


def test_in_programs() -> None:
    program = tsfunc.specialize(drawing(lambda x: torch.rand(3) + nnf.dropout(x, 0.5).sum()))
    plain = drawing(lambda x: torch.rand(3) + nnf.dropout(x, 0.5).sum())
    for seed in (1, 2):
        torch.manual_seed(seed)
        got = program(X)
        torch.manual_seed(seed)
        same(got, plain(X))
    assert not torch.equal(program(X), program(X))
    torch.manual_seed(3)
    whole = drawing(torch.rand_like)(X)
    torch.manual_seed(3)
    same(tsfunc.specialize(drawing(torch.rand_like, chunk_size=2))(X), whole)
    with pytest.raises(RuntimeError, match="Leave out chunk_size inside of specialize"):
        tsfunc.specialize(drawing(torch.rand_like, randomness="same", chunk_size=2))(X)


def test_parameters_are_checked() -> None:
    for draw, message in [
        (lambda x: torch.normal(0.0, -1.0, (2,)), "expected std >= 0.0, got std=-1"),
        (lambda x: torch.empty_like(x).uniform_(2, 1), "expected from <= to, got from=2"),
        (lambda x: torch.empty_like(x).exponential_(0.0), "expected lambda > 0.0"),
        (lambda x: torch.empty_like(x).cauchy_(0, 0.0), "expected sigma > 0.0"),
        (lambda x: torch.empty_like(x).log_normal_(0, 0.0), "expected std > 0.0"),
        (lambda x: torch.empty_like(x).geometric_(0.0), r"expected p in \(0, 1\), got"),
        (lambda x: torch.empty_like(x).bernoulli_(1.5), r"expected p in \[0, 1\], got"),
        (lambda x: torch.randint(3, 3, (2,)), "expected from < to, got from=3, to=3"),
        (lambda x: torch.multinomial(x, 7), "num_samples <= 6, the number of categories"),
        (lambda x: torch.multinomial(x, 0), "num_samples > 0, got num_samples=0"),
        (lambda x: torch.multinomial(-x, 1), "weights that are finite, not negative"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            drawing(draw)(X)


RANGES: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "uniform_": (lambda x: torch.empty(400).uniform_(), 0.0, 1.0),
    "uniform_ of bounds": (lambda x: torch.empty(400).uniform_(-3, -1), -3.0, -1.0),
    "rand": (lambda x: torch.rand(400), 0.0, 1.0),
    "random_ to": (lambda x: torch.empty(400).random_(3), 0.0, 2.0),
    "random_ from": (lambda x: torch.empty(400).random_(-2, 3), -2.0, 2.0),
    "randint": (lambda x: torch.randint(5, 9, (400,)), 5.0, 8.0),
    "bernoulli_": (lambda x: torch.empty(400).bernoulli_(), 0.0, 1.0),
}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_fill_their_range(name: str) -> None:
    draw, low, high = RANGES[name]
    drawn = drawing(draw)(X).double()
    margin = (high - low) / 20
    assert low <= float(drawn.min()) <= low + margin
    assert high - margin <= float(drawn.max()) <= high


BOUNDS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "bernoulli_": (torch.Tensor.bernoulli_, [(p,) for p in (-0.1, 0.0, 0.5, 1.0, 1.1)]),
    "geometric_": (torch.Tensor.geometric_, [(p,) for p in (-1.0, 0.0, 0.5, 1.0, 2.0)]),
    "exponential_": (torch.Tensor.exponential_, [(p,) for p in (-1.0, 0.0, 0.5)]),
    "cauchy_": (torch.Tensor.cauchy_, [(1.0, s) for s in (-1.0, 0.0, 0.5)]),
    "log_normal_": (torch.Tensor.log_normal_, [(1.0, s) for s in (-1.0, 0.0, 0.5)]),
    "normal_": (torch.Tensor.normal_, [(1.0, s) for s in (-1.0, 0.0, 0.5)]),
    "uniform_": (torch.Tensor.uniform_, [(2.0, 1.0), (1.0, 1.0), (0.0, 2.0)]),
    "random_": (torch.Tensor.random_, [(3, 3), (4, 3), (3, 4), (-3, 4)]),
    "random_ to": (torch.Tensor.random_, [(0,), (1,), (-1,)]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_parameters_at_the_bounds_are_taken_as_torch_takes_them(name: str) -> None:
    draw, calls = BOUNDS[name]
    for parameters in calls:

        def one(x: Tensor, parameters: tuple[Any, ...] = parameters) -> Any:
            return draw(torch.zeros_like(x), *parameters)

        try:
            one(X[0])
        except RuntimeError:
            with pytest.raises(RuntimeError):
                drawing(one)(X)
        else:
            assert drawing(one)(X).shape == X.shape, parameters


def test_an_operator_without_a_rule_draws_alone_too() -> None:
    """The operator runs in a loop, in which each example has its own seed."""
    name = "tsfunc_test::noisy"
    library = torch.library.Library("tsfunc_test", "FRAGMENT")
    library.define("noisy(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("noisy", lambda x: x + torch.rand(x.shape), "CompositeExplicitAutograd")
    op = torch.ops.tsfunc_test.noisy
    with pytest.warns(tsfunc.errors.SlowFallbackWarning, match=name):
        torch.manual_seed(8)
        whole = drawing(op)(X)
    torch.manual_seed(8)
    same(drawing(op, chunk_size=2)(X), whole)
    torch.manual_seed(8)
    same(drawing(op)(X[:2]), whole[:2])
    assert len((whole - X).unique()) == 42
    shared = vmap(op, randomness="same")(X)
    same(shared - X, (shared - X)[:1].expand(7, 6))


def halve(x: Tensor) -> Tensor:
    """Draw in each step; the number of steps differs between examples."""
    return tsfunc.while_loop(lambda x: x > 0.5, lambda x: x * (0.5 + 0.4 * torch.rand(())), x)


def coins(x: Tensor) -> Tensor:
    """Draw twice in one branch, once in the other, and once more afterwards."""
    y = tsfunc.cond(
        torch.rand(()) < 0.5,
        lambda x: x + torch.rand(()) + 10 * torch.randn(()),
        lambda x: x - nnf.dropout(torch.ones(()), 0.5),
        x,
    )
    return torch.stack([y, torch.rand(())])


def both(x: Tensor) -> Tensor:
    return coins(halve(x) + halve(x / 2))


@pytest.mark.parametrize("func", [halve, coins, both])
def test_examples_that_run_by_themselves(func: Func) -> None:
    """Numbers in branches and loops are those drawn alone, although other examples do not draw."""
    x = torch.linspace(0.2, 9, 12)
    torch.manual_seed(9)
    whole = drawing(func)(x)
    for chunk_size in (1, 5):
        torch.manual_seed(9)
        same(drawing(func, chunk_size=chunk_size)(x), whole)
    torch.manual_seed(9)
    same(drawing(func)(x[:3]), whole[:3])
    torch.manual_seed(9)
    same(drawing(func, data_dependent="split")(x), whole)


def chosen(x: Tensor) -> Tensor:
    """Steps and draws in a scan, by a random choice."""

    def step(carry: Tensor, _: Any) -> Any:
        i = torch.randint(0, 3, ())
        branches = [lambda c: c, lambda c: c + torch.rand(()), lambda c: c * torch.rand(2).sum()]
        return tsfunc.switch(i, branches, carry), torch.rand(())

    n = torch.randint(0, 4, ())
    y = tsfunc.fori_loop(0, n, lambda i, c: c + nnf.dropout(torch.ones(3)).sum(), x)
    last, drawn = tsfunc.scan(step, y, None, length=2)
    return torch.stack([last, *drawn])


def in_python(x: Tensor) -> Tensor:
    while x > 0.5:
        x = x * (0.5 + 0.4 * torch.rand(()))
    if torch.rand(()) < 0.5:
        x = x + torch.rand(())
    return x + torch.rand(())


@pytest.mark.parametrize("func", [halve, coins, both, chosen, in_python])
def test_nested_examples_that_run_by_themselves(func: Func) -> None:
    """Each example of both vmaps draws its own numbers, independent of the others."""
    split = functools.partial(drawing, data_dependent="split") if func is in_python else drawing
    x = torch.linspace(0.2, 9, 12).view(3, 4)
    torch.manual_seed(9)
    whole = split(split(func))(x)
    assert len(whole.unique()) == whole.numel()
    for outer, inner in ((None, 1), (1, None), (1, 1), (2, 3)):
        torch.manual_seed(9)
        same(split(split(func, chunk_size=inner), chunk_size=outer)(x), whole)
    torch.manual_seed(9)
    same(split(split(func))(x[:2, :3]), whole[:2, :3])


def test_three_vmaps_of_examples_that_run_by_themselves() -> None:
    x = torch.linspace(0.2, 9, 12).view(2, 3, 2)
    torch.manual_seed(9)
    whole = drawing(drawing(drawing(coins)))(x)
    for sizes in ((1, None, None), (None, 1, None), (None, None, 1)):
        nested: Func = coins
        for size in reversed(sizes):
            nested = drawing(nested, chunk_size=size)
        torch.manual_seed(9)
        same(nested(x), whole)


@pytest.mark.parametrize("inner", ["same", "different", "split"])
@pytest.mark.parametrize("outer", ["same", "different", "split"])
def test_an_inner_vmap_draws_in_a_branch_of_the_outer(outer: str, inner: str) -> None:
    """The inner vmap's operators draw for the outer examples that are in the branch."""

    def func(x: Tensor, flag: Tensor) -> Tensor:
        return tsfunc.cond(flag, lambda x: nnf.dropout(x) + torch.rand(40), torch.neg, x)

    x, flags = torch.ones(3, 4, 40), torch.tensor([True, False, True])
    out = vmap(vmap(func, in_dims=(0, None), randomness=inner), randomness=outer)(x, flags)
    same(out[1], -x[1])
    drawn = out[::2]
    assert bool((drawn == drawn[:1]).all()) is (outer == "same")
    assert bool((drawn == drawn[:, :1]).all()) is (inner == "same")
    torch.manual_seed(9)
    whole = vmap(vmap(func, in_dims=(0, None), randomness=inner), randomness="split")(x, flags)
    torch.manual_seed(9)
    rows = vmap(vmap(func, in_dims=(0, None), randomness=inner), randomness="split", chunk_size=1)(
        x, flags
    )
    same(whole, rows)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("func", [halve, coins])
def test_checkpoints_draw_the_same_numbers_for_each_example(func: Func, nested: bool) -> None:
    """This includes draws of all examples before some ran separately."""

    def total(x: Tensor) -> Tensor:
        return func(x).square().sum()

    def kept(x: Tensor) -> Any:
        return checkpoint(total, x, use_reentrant=False)

    def slopes(f: Func) -> Any:
        torch.manual_seed(9)
        each = drawing(tsfunc.grad(f))
        return (drawing(each) if nested else each)(x)

    x = torch.linspace(0.2, 9, 6, dtype=torch.float64)
    x = x.view(2, 3) if nested else x
    same(slopes(kept), slopes(total))


@pytest.mark.parametrize("order", ["vmap(vmap(grad))", "vmap(grad(vmap))", "grad(vmap(vmap))"])
def test_a_checkpoint_of_an_inner_vmap_in_a_branch_of_the_outer(order: str) -> None:
    """The rerun has the outer examples that were in the branch."""

    def branch(x: Tensor) -> Any:
        return (nnf.dropout(x) * torch.rand(40)).square().sum()

    def kept(x: Tensor) -> Any:
        return checkpoint(branch, x, use_reentrant=False)

    def slopes(taken: Func) -> Any:
        def func(x: Tensor, flag: Tensor) -> Any:
            return tsfunc.cond(flag, taken, torch.sum, x)

        torch.manual_seed(9)
        if order == "vmap(vmap(grad))":
            return drawing(drawing(tsfunc.grad(func), in_dims=(0, None)))(x, flags)
        inner = drawing(func, in_dims=(0, None))
        if order == "vmap(grad(vmap))":
            return drawing(tsfunc.grad(lambda x, flag: inner(x, flag).sum()))(x, flags)
        return tsfunc.grad(lambda x: drawing(inner)(x, flags).sum())(x)

    x, flags = torch.ones(3, 4, 40), torch.tensor([True, False, True])
    same(slopes(kept), slopes(branch))


def test_a_loop_in_checkpoints_draws_the_same_again() -> None:
    def func(x: Tensor) -> Any:
        return tsfunc.while_loop(
            lambda x: x > 0.5,
            lambda x: x.sin() * (0.5 + 0.4 * torch.rand(())),
            x,
            checkpoint="sqrt",
        )

    x = torch.linspace(0.2, 9, 6, dtype=torch.float64)
    torch.manual_seed(9)
    whole = drawing(tsfunc.grad(func))(x)
    torch.manual_seed(9)
    same(drawing(tsfunc.grad(func), chunk_size=1)(x), whole)


def test_checkpoints_of_examples_that_run_by_themselves() -> None:
    def dropped(x: Tensor) -> Any:
        return checkpoint(lambda x: nnf.dropout(x, 0.5).square(), x, use_reentrant=False)

    def func(x: Tensor) -> Tensor:
        y = tsfunc.cond(x.sum() > 0, lambda x: nnf.dropout(x) * 0 + x, lambda x: x, x)
        return dropped(y).sum()

    x = torch.ones(5, 200) * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None]
    grads = drawing(tsfunc.grad(func))(x)
    assert set(grads.abs().unique().tolist()) == {0.0, 8.0}


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(0, 3, dtype=torch.complex64),
    "rand_like": lambda x: torch.rand_like(x[:0]),
    "randint": lambda x: torch.randint(0, 3, (0, 2)),
    "exponential_": lambda x: torch.empty(0, 2).exponential_(),
    "normal": lambda x: torch.normal(x[:0], 1.0),
    "bernoulli": lambda x: torch.bernoulli(x[:0]),
    "poisson": lambda x: torch.poisson(x[:0]),
    "gamma": lambda x: torch._standard_gamma(x[:0]),
    "multinomial": lambda x: torch.multinomial(x.expand(0, 4), 2),
    "with replacement": lambda x: torch.multinomial(x.expand(0, 4), 2, replacement=True),
    "dropout": lambda x: nnf.dropout(x[:0]),
    "feature dropout": lambda x: nnf.feature_alpha_dropout(x.expand(1, 0, 4), training=True),
    "rrelu": lambda x: nnf.rrelu(x[:0], training=True),
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("examples", [3, 0])
def test_no_numbers_to_draw(name: str, examples: int) -> None:
    f = NOTHING[name]
    x = torch.full((examples, 4), 0.5)
    one = f(torch.full((4,), 0.5))
    drawn = drawing(f)(x)
    assert drawn.shape == (examples, *one.shape) and drawn.dtype is one.dtype


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_an_associative_scan_draws_alike_in_a_program(size: int) -> None:
    x = torch.randn(3, size)
    for mapped in (drawing(combined), combined):
        program = tsfunc.specialize(mapped)
        given = x if mapped is not combined else x[0]
        torch.manual_seed(5)
        eager = mapped(given)
        torch.manual_seed(5)
        torch.testing.assert_close(program(given), eager)


def test_an_associative_scan_that_draws_over_an_open_dim_is_refused() -> None:
    program = tsfunc.specialize(drawing(combined), {"x": tsfunc.MetaTensorType([3, "t"])})
    with pytest.raises(tsfunc.errors.DataDependentError, match="expected a function without rand"):
        program(torch.randn(3, 5))


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "random_": lambda x: x.random_(0, 9),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_draw_in_place_of_named_sizes(name: str) -> None:
    mapped = drawing(lambda x: IN_PLACE[name](x.new_empty(x.shape)))
    program = tsfunc.specialize(mapped, {"x": tsfunc.MetaTensorType([2, "n"])})
    for size in (5, 8, 3):
        x = torch.zeros(2, size)
        torch.manual_seed(3)
        eager = mapped(x)
        torch.manual_seed(3)
        same(program(x), eager)
