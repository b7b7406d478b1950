"""Calls that few programs make: their rules against the loop, or against torch's own call."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.harness import SIZE, Level
from tests.ops.test_distributions import alike
from tsfunc import grad, jvp, vmap
from tsfunc.ops import find
from tsfunc.ops.dims import op_name
from tsfunc.ops.splitting import groups_of

each = pytest.mark.parametrize


@each("shape", [(), (3,), (2, 3), (1, 3), (2, 1), (4, 2, 3)], ids=str)
@each("of", [(), (3,), (1, 3), (2, 1), (2, 3), (4, 1, 3)], ids=str)
def test_a_shared_mask_of_another_shape_selects(
    shape: tuple[int, ...], of: tuple[int, ...]
) -> None:
    try:
        torch.broadcast_shapes(shape, of)
    except RuntimeError:
        pytest.skip("torch refuses these shapes")
    x, mask = torch.randn(SIZE, *shape), torch.rand(of) < 0.6
    want = torch.stack([example.masked_select(mask) for example in x])
    for bdim in range(x.dim()):
        out = vmap(lambda x: x.masked_select(mask), in_dims=bdim)(x.movedim(0, bdim))
        torch.testing.assert_close(out, want)


@each("randomness", ["same", "different", "split"])
@each("p", [0.0, 1.0, 1.5, -0.1])
def test_chances_that_torch_refuses_are_refused(p: float, randomness: str) -> None:
    x = torch.randn(SIZE, 4)
    with pytest.raises(RuntimeError, match="geometric_"):
        x[0].clone().geometric_(p)
    with pytest.raises(RuntimeError, match="geometric_"):
        vmap(lambda x: x.clone().geometric_(p), randomness=randomness)(x)


@each("randomness", ["same", "different", "split"])
@each("p", [0.1, 0.5, 0.75])
@each("dropout", [F.alpha_dropout, F.feature_alpha_dropout, F.dropout, F.dropout1d])
def test_dropout_gives_the_two_numbers_that_torch_gives(
    dropout: Callable[..., Tensor], p: float, randomness: str
) -> None:
    ones = torch.ones(SIZE, 2, 100, 1, dtype=torch.float64)
    want = dropout(torch.ones(1, 400, 1, dtype=torch.float64), p, training=True).unique()
    out = vmap(lambda x: dropout(x, p, training=True), randomness=randomness)(ones).unique()
    assert len(want) == 2
    torch.testing.assert_close(out, want)


@each("in_dim", [0, 1, -1])
@each("name", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu"])
def test_only_calls_in_training_draw_in_any_order_of_calls(name: str, in_dim: int) -> None:
    torch_function = getattr(torch, name)
    numbers = (0.1, 0.3) if name == "rrelu" else (0.5,)
    example = torch.randn(2, 3, 10, dtype=torch.float64)

    def call(x: Tensor, train: bool) -> Tensor:
        return torch_function(x, *numbers, train)

    def gradient(x: Tensor, train: bool) -> Tensor:
        return grad(lambda x: call(x, train).sin().sum())(x)

    towers: list[Callable[..., Tensor]] = [
        call,
        gradient,
        lambda x, train: jvp(lambda x: call(x, train), (x,), (x.cos(),))[1],
        lambda x, train: vmap(lambda x: call(x, train), randomness=randomness)(x),
    ]
    for tower, train in random.sample([*itertools.product(towers, (False, True, False))], 12):
        x = torch.stack([example, example + 1, example * 2], in_dim)
        randomness = random.choice(["error", "same", "different", "split"])
        mapped = vmap(tower, in_dims=(in_dim, None), randomness=randomness)
        if train and randomness == "error":
            with pytest.raises(RuntimeError, match="randomness"):
                mapped(x, train)
        elif train:
            out = mapped(x, train)
            assert not out[0].equal(tower(example, False))
        else:
            want = torch.stack([tower(example, False) for example in x.unbind(in_dim)])
            torch.testing.assert_close(mapped(x, train), want)


@each("dtype", [None, torch.int32, torch.float64])
@each("randomness", ["same", "different", "split"])
@each("size", [0, 1, SIZE])
def test_permutations_of_a_batch_of_any_size(
    size: int, randomness: str, dtype: torch.dtype | None
) -> None:
    draw = functools.partial(torch.randperm, 5, dtype=dtype)
    out = vmap(lambda: draw(), axis_size=size, randomness=randomness)()
    assert out.dtype == draw().dtype
    assert out.sort(-1).values.equal(torch.arange(5).to(out.dtype).expand(size, 5))


@each("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32])
@each("randomness", ["different", "split"])
def test_bounds_of_each_example_in_any_dtype(dtype: torch.dtype, randomness: str) -> None:
    draw: Callable[..., Tensor] = torch.randint_like  # ``vmap`` has its first overload only
    bounds = torch.tensor([1, 2, 100]).to(dtype)
    like = torch.zeros(SIZE, 2000, dtype=torch.int64)
    out = vmap(draw, randomness=randomness)(like, bounds)
    assert out.amin(1).tolist() == [0, 0, 0]
    assert out.amax(1).tolist() == [0, 1, 99]
    assert out[2].unique().numel() == 100


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(2000),
    "randn": lambda x: torch.randn(2000),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    **{
        name: functools.partial(lambda name, x: getattr(torch.empty_like(x), name)(), name)
        for name in "uniform_ normal_ log_normal_ exponential_ cauchy_ bernoulli_".split()
    },
}


@each("name", DRAWS)
@each("randomness", ["different", "split"])
def test_draws_with_default_parameters_have_torchs_distribution(name: str, randomness: str) -> None:
    x = torch.zeros(4, 2000)
    alike(vmap(DRAWS[name], randomness=randomness)(x), torch.stack([DRAWS[name](r) for r in x]))


def test_names_of_operators_and_of_callables() -> None:
    part = functools.partial(torch.sin, torch.ones(()))
    assert op_name(torch.ops.aten.add.Tensor) == "aten::add.Tensor"
    assert op_name(torch.sin) == "sin"
    assert op_name(part) == str(part)


@each("columns", [1, 2, 3])
@each("count", [3, 256, 257, 600])
def test_rows_that_are_equal_are_grouped(count: int, columns: int) -> None:
    rng = random.Random(count * columns)
    kinds = [[rng.choice([0.0, -0.0, 1.5, math.nan]) for _ in range(columns)] for _ in range(9)]
    rows = [rng.choice(kinds) for _ in range(count)]
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(str(row), []).append(place)
    found = groups_of(torch.tensor(rows, dtype=torch.float64))
    assert sorted(group.tolist() for group in found) == sorted(groups.values())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@each("bdim", [0, 1, 2])
def test_values_of_sparse_examples_along_any_dim(bdim: int) -> None:
    indices = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 0, 0, 1, 1, 0], [0, 2, 2, 1, 0, 1]])
    dense = torch.zeros(3, 2, 3).index_put(tuple(indices), torch.arange(6.0) + 1).movedim(0, bdim)
    want = [dense.select(bdim, i).to_sparse().values() for i in range(3)]
    out = vmap(lambda x: x.values(), in_dims=bdim)(dense.to_sparse())
    torch.testing.assert_close(out, torch.stack(want))


@each(("gather", "shard"), list(itertools.product((0, 1, -1), (0, 2, -1))))
@each("bdim", [0, 1, 3])
def test_exchanged_dims_are_those_of_an_example(gather: int, shard: int, bdim: int) -> None:
    """A function of two dims stands in for the exchange, which needs several processes."""

    def exchange(x: Tensor, gather: int, shard: int, group: str) -> Tensor:
        assert group == "group" and x.is_contiguous()
        return x.roll(1, gather).cumsum(shard)

    row = find("_dtensor::shard_dim_alltoall")
    assert row is not None and row.rule is not None
    x = torch.randn(SIZE, 2, 3, 4)
    out, d = row.rule(
        exchange,
        Level(),
        [bdim, None, None, None],
        [x.movedim(0, bdim), gather, shard, "group"],
        {},
    )
    want = torch.stack([exchange(one, gather, shard, "group") for one in x])
    torch.testing.assert_close(out.movedim(d, 0), want)


@each("mode", ["sum", "mean", "max"])
@each("last", [False, True])
@each("features", [1, 2, 5])
def test_gradients_of_more_bags_than_features(mode: str, last: bool, features: int) -> None:
    weight = torch.randn(SIZE, 6, features, dtype=torch.float64)
    indices = torch.tensor([0, 3, 3, 5, 1, 2, 0])
    offsets = torch.tensor([0, 2, 2, 5, 7] if last else [0, 2, 2, 5])
    scale = torch.randn(4, features, dtype=torch.float64)

    def loss(weight: Tensor) -> Tensor:
        out = F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=last)
        return (out * scale).sum()

    want = [torch.autograd.functional.jacobian(loss, one) for one in weight]
    torch.testing.assert_close(vmap(grad(loss))(weight), torch.stack(want))
