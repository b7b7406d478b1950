"""Helpers of batching rules."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from tsfunc.ops import dims as d

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_wrap_agrees_with_torch(rank: int) -> None:
    x = torch.zeros([2] * rank)
    for dim in range(-4, 5):
        try:
            x.sum(dim)
        except IndexError as e:
            with pytest.raises(IndexError, match=r"Dimension out of range \(expected to be in"):
                d.wrap_dim(dim, rank)
            assert str(e).startswith("Dimension out of range")
        else:
            assert d.wrap_dim(dim, rank) % max(rank, 1) == dim % max(rank, 1)


def test_physical_dim_skips_the_batch_dim() -> None:
    for bdim in range(4):
        logical = [dim for dim in range(4) if dim != bdim]
        assert d.physical_dims([0, 1, 2], 3, bdim) == logical
        assert d.physical_dims([-3, -2, -1], 3, bdim) == logical
        assert d.every_dim(3, bdim) == logical


@pytest.mark.parametrize("ranks", list(itertools.product(range(4), repeat=2)))
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_align_broadcasts_as_examples_do(ranks: tuple[int, int], which: tuple[int, ...]) -> None:
    sizes = ([3, 2, 1], [1, 2, 4])
    logical = [torch.randn(s[3 - r :]) for s, r in zip(sizes, ranks, strict=True)]
    places: list[Any] = [range(r + 1) if i in which else [None] for i, r in enumerate(ranks)]
    for bdims in itertools.product(*places):
        batches = [
            x if bdim is None else torch.stack([x + k for k in range(5)])
            for x, bdim in zip(logical, bdims, strict=True)
        ]
        physical = [
            b if bdim is None else b.movedim(0, bdim)
            for b, bdim in zip(batches, bdims, strict=True)
        ]
        (x, y), out = d.align(physical, bdims)
        total = (x + y).movedim(out, 0)
        for k in range(5):
            one, two = (b if bdim is None else b[k] for b, bdim in zip(batches, bdims, strict=True))
            assert torch.equal(total[k], one + two)


def test_align_leaves_the_largest_value_where_it_is() -> None:
    x, y = torch.zeros(2, 5, 3), torch.zeros(5, 3)
    (placed, other), bdim = d.align((x, y), (1, 0))
    assert placed is x
    assert bdim == 1
    assert other.data_ptr() == y.data_ptr()


def test_promotion_below_agrees_with_torch() -> None:
    for high, low in itertools.product(DTYPES, repeat=2):
        expected = torch.result_type(torch.zeros(1, dtype=high), torch.zeros((), dtype=low))
        assert d.promote_scalar_dtype(high, low) is expected, (high, low)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_scalars_are_promoted_as_scalars() -> None:
    for high, low, batched in itertools.product(DTYPES, DTYPES, [(0,), (1,), (0, 1)]):
        for rank in (0, 1):
            x, y = torch.zeros([1] * rank, dtype=high), torch.zeros((), dtype=low)
            expected = torch.result_type(x, y)
            args: list[Any] = [x, y]
            where: list[int | None] = [None, None]
            for i in batched:
                args[i], where[i] = args[i].unsqueeze(0), 0
            assert torch.result_type(*d.promote_scalars(args, where)) is expected, (high, low)


def test_batched_front_is_a_view() -> None:
    x = torch.randn(2, 3)
    made = d.expand_to_front(x, None, 5)
    assert made.shape == (5, 2, 3)
    assert made.stride(0) == 0
    assert d.expand_to_front(x, 1, 3).shape == (3, 2)
    assert d.expand_at(x, None, 5, 1).shape == (2, 5, 3)
    assert d.expand_at(x, 0, 2, 1).shape == (3, 2)


def test_writing_into_an_unbatched_tensor_is_refused() -> None:
    expected = r"aten::add_.Tensor writes batched values in place .* Use the out-of-place add "
    with pytest.raises(RuntimeError, match=expected):
        d.refuse_inplace(torch.ops.aten.add_.Tensor)
    words = r"inplace arithmetic\(self, \*extra_args\) is not possible because there exists a"
    with pytest.raises(RuntimeError, match=words):
        d.refuse_inplace(torch.Tensor.add_)


def test_memory_order_is_that_of_empty_like(request: pytest.FixtureRequest) -> None:
    rng = random.Random(request.config.option.hypothesis_seed)
    memory = torch.zeros(1000)
    for _ in range(500):
        rank = rng.randrange(5)
        shape = [rng.choice((1, 2, 3, 4)) for _ in range(rank)]
        strides = [rng.choice((0, 1, 2, 3, 12, 24)) for _ in range(rank)]
        x = memory.as_strided(shape, strides)
        order = d.memory_order(shape, strides)
        assert d.permuted_back(x.permute(order), order).stride() == x.stride()
        if torch.ops.aten.is_non_overlapping_and_dense(x):
            continue  # strides are kept, those of dims of size 1 included
        made = d.dense_strides(shape, order)
        assert made == [*torch.empty_like(x).stride()], (shape, strides)
        assert made == [*d.without_overlaps(x).stride()]


def test_memory_span_reaches_from_the_first_to_the_last_element(
    request: pytest.FixtureRequest,
) -> None:
    rng = random.Random(request.config.option.hypothesis_seed)
    places = torch.arange(500)
    for _ in range(200):
        rank = rng.randrange(4)
        shape = [rng.randrange(5) for _ in range(rank)]
        strides = [rng.choice((0, 1, 2, 7, 30)) for _ in range(rank)]
        reached = places.as_strided(shape, strides)
        expected = int(reached.max() - reached.min()) + 1 if reached.numel() else 0
        assert d.memory_span(shape, strides) == expected, (shape, strides)


def test_defaults_fill_up() -> None:
    assert d.with_defaults((), 0, -1) == [0, -1]
    assert d.with_defaults((2,), 0, -1) == [2, -1]
    assert d.with_defaults((2, 3), 0, -1) == [2, 3]
