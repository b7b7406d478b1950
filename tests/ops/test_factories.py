"""Factories and random operators: shapes and dtypes as for one example, and shared or own draws."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import tsfunc
from tests.ops.harness import Level, check, overload, rows_of
from tsfunc.ops import find

X, S = torch.randn(2, 3), torch.randn(())
CHANCES = torch.full((2, 3), 0.5)


def rule_of(name: str) -> Any:
    row = find(f"aten::{name}")
    assert row is not None and row.rule is not None
    return functools.partial(row.rule, overload(row.name))


def test_every_row_is_here() -> None:
    made = {f"aten::{n}" for n in (*NEW, *SPACES, "new_empty", "new_empty_strided")}
    assert made == set(rows_of("factories.py"))
    drawn = {*SIZED, *LIKE, *INPLACE, *FROM, *OTHERS}
    assert {f"aten::{n}" for n in drawn} == set(rows_of("random.py"))


NEW: dict[str, list[tuple[Any, ...]]] = {
    "new_zeros": [(X, [4]), (S, []), (X, [2, 0])],
    "new_ones": [(X, [4])],
    "new_full": [(X, [4, 1], 2.5), (X, [], 1)],
}


@pytest.mark.parametrize("name", NEW)
def test_new_factories_equal_the_loop(name: str) -> None:
    for args in NEW[name]:
        assert check(overload(f"aten::{name}"), *args)
        assert check(overload(f"aten::{name}"), *args, dtype=torch.int64)


@pytest.mark.parametrize("bdim", [0, 1, 2])
def test_new_empty(bdim: int) -> None:
    x = torch.stack([X] * 4).movedim(0, bdim)
    out, where = rule_of("new_empty")(Level(4), [bdim, None], (x, [2, 5]), {"dtype": torch.int64})
    assert where == 0 and out.shape == (4, 2, 5) and out.dtype is torch.int64
    for size, stride in [([2, 5], [1, 2]), ([2, 5], [7, 1]), ([], []), ([0, 3], [3, 1])]:
        args = (x, size, stride)
        out, where = rule_of("new_empty_strided")(Level(4), [bdim, None, None], args, {})
        example = out.select(where, 1)
        assert list(example.shape) == size and list(example.stride()) == stride
        out.fill_(0).select(where, 0).fill_(1)
        assert example.sum() == 0, "examples share memory"


SPACES: dict[str, tuple[Any, ...]] = {
    "linspace.Tensor_Tensor": (S, S + 3, 7),
    "linspace.Tensor_Scalar": (S, 2, 5),
    "linspace.Scalar_Tensor": (-1, S, 1),
    "logspace.Tensor_Tensor": (S, S + 3, 7),
    "logspace.Tensor_Scalar": (S, 2, 5, 2.0),
    "logspace.Scalar_Tensor": (-1, S, 4),
}


@pytest.mark.parametrize("name", SPACES)
def test_ranges_with_batched_ends_equal_the_loop(name: str) -> None:
    op = overload(f"aten::{name}")
    assert check(op, *SPACES[name]) and check(op, *SPACES[name], dtype=torch.float64)
    for dtype in (torch.complex64, torch.complex128):
        ends = [a * (1 + 1j) if isinstance(a, torch.Tensor) else a for a in SPACES[name][:2]]
        ends = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in ends]
        assert check(op, *ends, *SPACES[name][2:])
    if name.startswith("linspace"):
        # Steps that a float holds exactly: kernels cut off other steps differently.
        whole = [a * 0 + 16 if isinstance(a, torch.Tensor) else a for a in SPACES[name][:2]]
        assert check(op, *whole, 2, dtype=torch.int64)


SIZED: dict[str, tuple[Any, ...]] = {
    "rand": ([2, 3],),
    "rand.generator": ([2, 3],),
    "randn": ([2, 3],),
    "randn.generator": ([2, 3],),
    "randint": (100, [2, 3]),
    "randint.generator": (100, [2, 3]),
    "randint.low": (5, 100, [2, 3]),
    "randint.low_generator": (5, 100, [2, 3]),
    "normal.float_float": (1.0, 2.0, [2, 3]),
    "randperm": (20,),
    "randperm.generator": (20,),
}
LIKE: dict[str, tuple[Any, ...]] = {
    "rand_like": (),
    "rand_like.generator": (),
    "randn_like": (),
    "randn_like.generator": (),
    "randint_like": (100,),
    "randint_like.generator": (100,),
    "randint_like.Tensor": (torch.tensor(100),),
    "randint_like.Tensor_generator": (torch.tensor(100),),
    "randint_like.low_dtype": (5, 100),
    "randint_like.low_generator_dtype": (5, 100),
    "bernoulli.p": (0.5,),
    "normal_functional": (),
    "uniform": (),
    "exponential": (),
    "geometric": (0.1,),
    "cauchy": (),
    "log_normal": (),
    "random": (),
    "random.from": (1, 100),
    "random.to": (100,),
    "dropout": (0.5, True),
    "alpha_dropout": (0.5, True),
    "native_dropout": (0.5, True),
    "rrelu": (0.1, 0.9, True),
}
INPLACE: dict[str, tuple[Any, ...]] = {
    "normal_": (),
    "uniform_": (),
    "exponential_": (),
    "geometric_": (0.1,),
    "cauchy_": (),
    "log_normal_": (),
    "random_": (),
    "random_.from": (1, 100),
    "random_.to": (100,),
    "bernoulli_.float": (0.5,),
    "bernoulli_.Tensor": (CHANCES,),
}
FROM: dict[str, tuple[Any, ...]] = {
    "bernoulli": (CHANCES,),
    "bernoulli.Tensor": (X, CHANCES),
    "normal.Tensor_Tensor": (X, CHANCES),
    "normal.Tensor_float": (X, 2.0),
    "normal.float_Tensor": (1.0, CHANCES),
    "poisson": (CHANCES * 40,),
    "binomial": (CHANCES * 80, CHANCES),
    "_standard_gamma": (CHANCES,),
    "_sample_dirichlet": (CHANCES,),
    "multinomial": (torch.ones(2, 50), 6),
}
OTHERS = {"feature_dropout", "feature_alpha_dropout", "rrelu_with_noise", "rrelu_with_noise_"}


def wants_generator(name: str) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(1)} if "generator" in name else {}


def first(out: Any) -> Any:
    """Return the first result, and its batch dim."""
    value, bdim = out
    return (value[0] if isinstance(value, tuple) else value), bdim


def distinct(out: torch.Tensor, bdim: int) -> bool:
    parts = out.unbind(bdim)
    return not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize("name", [*SIZED, *LIKE, *INPLACE, *FROM])
def test_random_operators_are_refused_by_default(name: str) -> None:
    x = [torch.randn(4, 2, 3)] if name in LIKE or name in INPLACE else []
    args = (*x, *{**SIZED, **LIKE, **INPLACE, **FROM}[name])
    bdims = [0 if i == 0 and x else None for i in range(len(args))]
    with pytest.raises(RuntimeError, match="called random operation while in randomness error"):
        rule_of(name)(Level(4), bdims, args, {})


@pytest.mark.parametrize("name", SIZED)
def test_random_factories_by_randomness(name: str) -> None:
    args, bdims = SIZED[name], [None] * len(SIZED[name])
    example = overload(f"aten::{name}")(*args, dtype=torch.float32, **wants_generator(name))
    options = {"dtype": torch.float32, **wants_generator(name)}
    out, bdim = rule_of(name)(Level(4, "different"), bdims, args, options)
    assert bdim == 0 and out.shape == (4, *example.shape) and out.dtype is example.dtype
    assert distinct(out, 0)
    if name == "randperm":
        assert torch.equal(out.sort(-1).values[2], torch.arange(20.0))
    out, bdim = rule_of(name)(Level(4, "same"), bdims, args, options)
    assert bdim is None and out.shape == example.shape


@pytest.mark.parametrize("bdim", [None, 0, 1, 2])
@pytest.mark.parametrize("name", LIKE)
def test_random_factories_like_a_tensor(name: str, bdim: int | None) -> None:
    example = torch.randn(8, 9)
    x = example if bdim is None else torch.stack([example] * 4).movedim(0, bdim)
    rest = LIKE[name]
    bdims = [bdim] + [None] * len(rest)
    options = wants_generator(name)
    out, where = first(rule_of(name)(Level(4, "different"), bdims, (x, *rest), options))
    assert out.select(where, 0).shape == example.shape and out.shape[where] == 4
    assert distinct(out, where)
    torch.manual_seed(0)
    out, where = first(rule_of(name)(Level(4, "same"), bdims, (x, *rest), options))
    one = out if where is None else out.select(where, 0)
    assert one.shape == example.shape
    assert where is None or all(torch.equal(one, part) for part in out.unbind(where))
    assert torch.equal(x, example if bdim is None else torch.stack([example] * 4).movedim(0, bdim))


@pytest.mark.parametrize("randomness", ["same", "different", "split"])
@pytest.mark.parametrize("name", [name for name in LIKE if "_like" in name])
def test_options_of_factories_like_a_tensor(name: str, randomness: str) -> None:
    x, rest = torch.randn(4, 8, 9), LIKE[name]
    for options in (
        {"memory_format": torch.preserve_format},
        {"memory_format": torch.contiguous_format, "dtype": torch.float64},
        {"dtype": torch.float16},
    ):
        named = {**options, **wants_generator(name)}
        level = Level(4, randomness)
        out, bdim = first(rule_of(name)(level, [0] + [None] * len(rest), (x, *rest), named))
        assert out.dtype is options.get("dtype", torch.float32)
        assert out.shape == (x.shape if bdim is not None else x.shape[1:])


DRAWS = {**SIZED, **LIKE, **INPLACE, **FROM, "rrelu_with_noise": (X, 0.1, 0.3, True)}
WITH_GENERATOR = sorted(
    name
    for name in DRAWS
    if any(a.name == "generator" for a in overload(f"aten::{name}")._schema.arguments)
)


@pytest.mark.parametrize("randomness", ["same", "different", "split"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", WITH_GENERATOR)
def test_a_draw_reads_its_generator_and_no_other(name: str, batched: bool, randomness: str) -> None:
    rest = DRAWS[name]
    if name in (*LIKE, *INPLACE, "rrelu_with_noise"):
        x = torch.zeros(4, 2, 3) if batched else torch.zeros(2, 3)
        args, bdims = (x, *rest), [0 if batched else None] + [None] * len(rest)
        if name == "rrelu_with_noise":
            args, bdims = (x, x.clone(), *rest[1:]), [*bdims[:1] * 2, None, None, None]
    else:
        args, bdims = rest, [None] * len(rest)
        if batched:
            return
    generator = torch.Generator().manual_seed(1)
    named: dict[str, Any] = {"generator": generator}
    last = overload(f"aten::{name}")._schema.arguments[-1]
    if last.name == "generator" and not last.kwarg_only:
        args, bdims, named = (*args, generator), [*bdims, None], {}
    own, default = generator.get_state(), torch.get_rng_state()
    try:
        rule_of(name)(Level(4, randomness), bdims, args, named)
    except RuntimeError as error:  # a write into an unbatched tensor
        assert "unbatched" in str(error) or "in place" in str(error)
        return
    assert not torch.equal(generator.get_state(), own)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.mark.parametrize("bdim", [0, 1, 2])
@pytest.mark.parametrize("name", INPLACE)
def test_inplace(name: str, bdim: int) -> None:
    rest = tuple(CHANCES[:1, :1] if isinstance(a, torch.Tensor) else a for a in INPLACE[name])
    bdims = [bdim] + [None] * len(rest)
    x = torch.zeros(4, 8, 9).movedim(0, bdim).clone()
    out, where = rule_of(name)(Level(4, "different"), bdims, (x, *rest), {})
    assert out is x and where == bdim and distinct(x, bdim)
    out, where = rule_of(name)(Level(4, "same"), bdims, (x, *rest), {})
    assert out is x and all(torch.equal(x.select(bdim, 0), part) for part in x.unbind(bdim))
    plain = torch.zeros(8, 9)
    out, where = rule_of(name)(Level(4, "same"), [None] * len(bdims), (plain, *rest), {})
    assert out is plain and where is None
    with pytest.raises(RuntimeError, match="Cannot ask for different inplace randomness on an unb"):
        rule_of(name)(Level(4, "different"), [None] * len(bdims), (plain, *rest), {})


@pytest.mark.parametrize("name", FROM)
def test_distributions(name: str) -> None:
    args = FROM[name]
    example = overload(f"aten::{name}")(*args)
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    for chosen in [tensors, tensors[:1], tensors[-1:], []]:
        for bdim in (0, 1, 2):
            bdims = [bdim if i in chosen else None for i in range(len(args))]
            given = [
                torch.stack([a] * 6).movedim(0, bdim) if i in chosen else a
                for i, a in enumerate(args)
            ]
            out, where = rule_of(name)(Level(6, "different"), bdims, given, {})
            assert out.select(where, 0).shape == example.shape and out.shape[where] == 6
            assert out.dtype is example.dtype
            assert not all(torch.equal(out.select(where, 0), part) for part in out.unbind(where))
            if chosen:
                with pytest.raises(RuntimeError, match="same randomness with a batched tensor"):
                    rule_of(name)(Level(6, "same"), bdims, given, {})
            else:
                out, where = rule_of(name)(Level(6, "same"), bdims, given, {})
                assert where is None and out.shape == example.shape


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "name", ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"]
)
def test_dropouts(name: str, p: float) -> None:
    x = torch.randn(50, 40, 4, 60)
    for mode in ("same", "different"):
        out, bdim = rule_of(name)(Level(4, mode), [2, None, None], (x, p, True), {})
        assert out.shape == x.shape and bdim == 2
        if p == 0:
            assert torch.equal(out, x)
        elif p == 1:
            assert not bool(out.any())
        else:
            assert abs(float(out.mean())) < 0.05
            assert abs(float((x * out).mean()) - float((x * x).mean())) < 0.1 or "alpha" in name
        out, bdim = rule_of(name)(Level(4), [2, None, None], (x, p, False), {})
        assert out is x
    if p == 0.3 and "feature" in name:
        level = Level(4, "different")
        out, _ = rule_of("feature_dropout")(level, [2, None, None], (x, p, True), {})
        gone = (out == 0).all(-1)
        assert 0.25 < float(gone.float().mean()) < 0.35
        assert torch.equal(gone, (out == 0).any(-1))


@pytest.mark.parametrize("name", ["rrelu_with_noise", "rrelu_with_noise_"])
def test_rrelu_with_noise(name: str) -> None:
    for mode in ("same", "different"):
        x, noise = torch.randn(30, 4, 20), torch.zeros(4, 30, 20)
        before = x.clone()
        args = (x, noise, 0.1, 0.3, True)
        out, bdim = rule_of(name)(Level(4, mode), [1, 0, None, None, None], args, {})
        slopes = noise.movedim(0, 1)
        torch.testing.assert_close(out, before * slopes)
        assert bdim == 1 and (out is x) == name.endswith("_")
        negative = slopes[before <= 0]
        assert float(negative.min()) >= 0.1 and float(negative.max()) <= 0.3
        assert bool((slopes[before > 0] == 1).all())
    x = torch.randn(30, 4, 20)
    args = (x.clone(), torch.zeros(4, 30, 20), 0.1, 0.3, False)
    out, _ = rule_of(name)(Level(4), [1, 0, None, None, None], args, {})
    torch.testing.assert_close(out, torch.nn.functional.leaky_relu(x, 0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 7), (3, 5, 4)])
def test_rrelu_draws_the_same_as_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch draws for negative elements only, so the other elements change a draw."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rrelu(x, 0.1, 0.9, training=True)

    def alone(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return f(x)

    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    want = torch.stack([alone(one) for one in x])
    for bdim in range(x.dim()):
        torch.manual_seed(5)
        got = tsfunc.vmap(f, bdim, randomness="same")(x.movedim(0, bdim))
        torch.testing.assert_close(got, want)
    assert tsfunc.vmap(f, randomness="same")(x[:0]).shape == (0, *shape[1:])


def test_native_dropout_in_evaluation() -> None:
    x = torch.randn(4, 3)
    (out, mask), bdim = rule_of("native_dropout")(Level(4), [0, None, None], (x, 0.5, False), {})
    assert torch.equal(out, x) and bool(mask.all()) and bdim == 0


def test_new_tells_a_size_from_data() -> None:
    x = torch.arange(3.0).view(3, 1)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.new(torch.Size([4])).zero_() + x, x.new((4, 5)) + x, x.new(2, 3).zero_() + x

    for mine, want in zip(tsfunc.vmap(f)(x), zip(*map(f, x), strict=True), strict=True):
        assert torch.equal(mine, torch.stack(want))
    tsfunc.vmap(tsfunc.grad(lambda x: f(x)[0].sum()))(x)


@pytest.mark.parametrize("randomness", ["different", "split"])
def test_multinomial_counts_of_each_example(randomness: str) -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])

    def draw(p: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Multinomial(5, p).sample()

    drawn = tsfunc.vmap(draw, randomness=randomness)(probs)
    assert drawn.shape == (3, 3) and torch.equal(drawn.sum(1), torch.full((3,), 5.0))
    assert torch.equal(drawn[:2], 5 * probs[:2])


@pytest.mark.parametrize("randomness", ["different", "same", "split"])
@pytest.mark.parametrize("name", ["feature_dropout", "feature_alpha_dropout"])
def test_feature_dropouts_refuse_examples_without_features(name: str, randomness: str) -> None:
    drop = getattr(torch, name)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        drop(torch.ones(4), 0.5, True)
    for in_dim in (0, 1):
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            tsfunc.vmap(lambda x: drop(x, 0.5, True), in_dim, randomness=randomness)(
                torch.ones(3, 4)
            )
    mapped = tsfunc.vmap(lambda x: drop(x, 0.5, True), randomness=randomness)(torch.ones(3, 4, 5))
    assert mapped.shape == (3, 4, 5)
