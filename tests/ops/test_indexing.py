"""Indexing against the loop, with every choice of batched values, indices and sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsfunc.ops  # noqa: F401  (declares rows)
from tests.ops.harness import Level, check, normal
from tsfunc.errors import DataDependentError
from tsfunc.ops.registry import find

aten = torch.ops.aten


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_gather(dim: int) -> None:
    assert check(
        aten.gather.default, normal(4, 5), dim, ints(4, 4, 3) if dim % 2 else ints(4, 2, 5)
    )


def test_gather_without_dims() -> None:
    assert check(aten.gather.default, normal(), 0, torch.tensor(0))
    assert check(aten.gather.default, normal(4), 0, torch.tensor(2))
    assert check(aten.gather.default, normal(4), -1, ints(4, 0))


@pytest.mark.parametrize("suffix", ["", "_"])
@pytest.mark.parametrize("dim", [0, -1])
def test_scatter(suffix: str, dim: int) -> None:
    # Distinct positions in each line, so that the last write is determined.
    index = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).argsort(dim)[:4, :4]
    index = index.clamp(max=3) if suffix else index.remainder(4)
    index = torch.stack([torch.randperm(4) for _ in range(4)])
    index = index if dim else index.t().contiguous()
    x, src = normal(4, 4), normal(4, 4) * 2
    packet = getattr(aten, "scatter" + suffix)
    assert check(packet.value, x, dim, index, 2.5)
    assert check(packet.value_reduce, x, dim, index, 2.5, reduce="add")
    assert check(packet.reduce, x, dim, index, src, reduce="multiply")
    assert check(getattr(aten, "scatter_add" + suffix).default, x, dim, ints(4, 4, 4), src)
    for reduce in ("sum", "prod", "mean", "amax", "amin"):
        op = getattr(aten, "scatter_reduce" + suffix).two
        assert check(op, x, dim, ints(4, 4, 4), src, reduce, include_self=False)
    assert check(
        getattr(aten, "scatter_add" + suffix).default, normal(), 0, torch.tensor(0), normal()
    )


def test_scatter_of_a_permutation() -> None:
    x, index = normal(4, 5), torch.tensor([[2, 0, 1, 3, 1]])
    assert check(aten.scatter.src, x, 0, index, normal(4, 5) * 2)
    assert check(aten.scatter_.src, x, -2, index, normal(1, 5) * 2)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_select(dim: int) -> None:
    assert check(aten.index_select.default, normal(4, 5, 6), dim, ints(4, 3))
    assert check(aten.index_select.default, normal(4, 5, 6), dim, torch.tensor(2))
    assert check(aten.index_select.default, normal(4, 5, 6), dim, ints(4, 0))


def test_index_select_without_dims() -> None:
    assert check(aten.index_select.default, normal(), 0, torch.tensor([0]))


@pytest.mark.parametrize("suffix", ["", "_"])
@pytest.mark.parametrize("dim", [0, -1])
def test_index_writes(suffix: str, dim: int) -> None:
    x = normal(4, 5)
    src = normal(2, 5) if dim == 0 else normal(4, 2)
    assert check(getattr(aten, "index_add" + suffix).default, x, dim, ints(4, 2), src)
    assert check(getattr(aten, "index_add" + suffix).default, x, dim, ints(4, 2), src, alpha=2)
    index = torch.tensor([3, 1])
    assert check(getattr(aten, "index_copy" + suffix).default, x, dim, index, src)
    for reduce in ("prod", "mean", "amax", "amin"):
        op = getattr(aten, "index_reduce" + suffix).default
        assert check(op, x, dim, ints(4, 2), src, reduce)
        assert check(op, x, dim, ints(4, 2), src, reduce, include_self=False)
    fill = getattr(aten, "index_fill" + suffix)
    assert check(fill.int_Scalar, x, dim, ints(4, 2), 2.5)
    assert check(fill.int_Tensor, x, dim, ints(4, 2), torch.tensor(2.5, dtype=torch.float64))
    assert check(fill.int_Scalar, x, dim, torch.tensor(1), 2.5)


def test_take_and_put() -> None:
    assert check(aten.take.default, normal(4, 5), ints(20, 2, 3) - 5)
    assert check(aten.take.default, normal(), torch.tensor([0, -1]))
    assert check(aten.take.default, normal(4, 5), torch.tensor(3))
    for suffix in ("", "_"):
        put = getattr(aten, "put" + suffix).default
        assert check(put, normal(4, 5), torch.tensor([3, -1, 7]), normal(3))
        assert check(put, normal(4, 5), ints(20, 2, 3), normal(2, 3), True)


def test_masked_scatter() -> None:
    mask = torch.tensor([True, False, True, True])
    for suffix in ("", "_"):
        op = getattr(aten, "masked_scatter" + suffix).default
        assert check(op, normal(2, 4), mask, normal(3, 4))
        assert check(op, normal(2, 4), mask.view(2, 2).repeat(1, 2), normal(8))
    assert check(aten.masked_scatter_backward.default, normal(4), mask, [3, 2])
    assert check(aten.masked_scatter_backward.default, normal(2, 4), mask, [2, 4])


INDEX_CASES = [
    # logical shape and the indices
    ((4, 5), (torch.tensor([0, 2]),)),
    ((4, 5), (torch.tensor([0, -1]), torch.tensor([1, 3]))),
    ((4, 5), (None, torch.tensor([0, 2]))),
    ((4, 5, 6), (None, torch.tensor([0, 2]), torch.tensor([[1], [3]]))),
    ((4, 5, 6), (torch.tensor([0, 2]), None, torch.tensor([1, 3]))),
    ((4, 5, 6), (torch.tensor([[0, 2]]), None, torch.tensor(1))),
    ((4, 5, 6), (None, torch.tensor([[0, 2], [1, 1], [3, 2]]))),
    ((4, 5, 6, 2), (None, torch.tensor(2), None, torch.tensor([0, 1, 1]))),
    ((4,), (torch.tensor(2),)),
    ((4, 5), (torch.zeros(0, dtype=torch.int64),)),
]


@pytest.mark.parametrize("case", INDEX_CASES)
def test_index(case: tuple[tuple[int, ...], tuple[torch.Tensor | None, ...]]) -> None:
    shape, indices = case
    assert check(aten.index.Tensor, normal(*shape), list(indices))
    assert check(aten._unsafe_index.Tensor, normal(*shape), list(indices))


@pytest.mark.parametrize("suffix", ["", "_"])
@pytest.mark.parametrize("case", INDEX_CASES)
def test_index_put(
    suffix: str, case: tuple[tuple[int, ...], tuple[torch.Tensor | None, ...]]
) -> None:
    shape, indices = case
    op = getattr(aten, "index_put" + suffix).default
    result = aten.index(normal(*shape), indices)
    shapes = {tuple(result.shape), tuple(result.shape[1:]), (), (1, *result.shape[1:])}
    for values in sorted(shapes):
        if result.dim() >= len(values):
            assert check(op, normal(*shape), list(indices), normal(*values), True)


def test_masks_that_are_the_same_for_all() -> None:
    mask = torch.tensor([True, False, True, True])
    x = normal(4, 5)
    index, put = aten.index.Tensor, aten.index_put.default
    assert check(index, x, [mask], choices=[(0,)])
    assert check(index, x.t().contiguous(), [None, mask], choices=[(0,)])
    assert check(index, x, [mask, ints(5, 3)], choices=[(0,), (2,), (0, 2)])
    assert check(index, x, [x > 0], choices=[(0,)])
    assert check(put, x, [mask], normal(), choices=[(0,), (2,), (0, 2)])
    assert check(put, x, [mask], normal(3, 5), choices=[(0,), (2,), (0, 2)])
    assert check(aten.masked_select.default, x, mask.view(4, 1), choices=[(0,)])


def test_batched_masks_are_refused() -> None:
    found = find("aten::index.Tensor")
    assert found is not None and found.rule is not None
    x = normal(3, 4)
    with pytest.raises(DataDependentError, match=r"torch\.where"):
        found.rule(aten.index.Tensor, Level(), [0, [0]], [x, [x > 0]], {})
    # Writing one value everywhere needs no data-dependent size.
    assert check(aten.index_put.default, normal(4, 5), [normal(4, 5) > 0], normal())
    assert check(aten.index_put_.default, normal(4, 5), [normal(4) > 0], normal(1))


def test_writing_into_an_unbatched_tensor_is_refused() -> None:
    found = find("aten::index_put_")
    assert found is not None and found.rule is not None
    with pytest.raises(RuntimeError, match="not batched over this vmap"):
        args = [normal(4), [torch.tensor([0])], normal(3, 1)]
        found.rule(aten.index_put_.default, Level(), [None, None, 0], args, {})


def test_bucketize_and_searchsorted() -> None:
    sequence = torch.tensor([0.0, 1, 2, 5, 7], dtype=torch.float64)
    for right in (False, True):
        bucketize = aten.bucketize.Tensor
        assert check(bucketize, normal(2, 3) * 4, sequence, right=right, out_int32=True)
        assert check(bucketize, normal(), sequence, right=right)
        assert check(aten.searchsorted.Tensor, sequence, normal(2, 3) * 4, right=right)
        assert check(aten.searchsorted.Tensor, sequence, normal() * 4, right=right)
        stacked = torch.stack([sequence, sequence * 2])
        assert check(aten.searchsorted.Tensor, stacked, normal(2, 3) * 4, right=right)
    assert check(aten.searchsorted.Scalar, sequence, 3.5)


def test_one_hot() -> None:
    assert check(aten.one_hot.default, ints(4, 2, 3), 4)
    with pytest.raises(DataDependentError, match="num_classes"):
        check(aten.one_hot.default, ints(4, 3))


@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
def test_embedding(shape: tuple[int, ...]) -> None:
    weight, index = normal(6, 5), ints(6, *shape)
    assert check(aten.embedding.default, weight, index)
    for padding in (-1, 0, 4):
        op = aten.embedding_dense_backward.default
        assert check(op, normal(*shape, 5), index, 6, padding, False)
        assert check(op, normal(*shape, 5), index, 6, padding, True)


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("unique", [False, True])
def test_isin(invert: bool, unique: bool) -> None:
    values = torch.stack([torch.randperm(9)[:6].view(2, 3) for _ in range(4)])
    kwargs: Any = {"invert": invert, "assume_unique": unique}
    for shape in ((2, 3), (6,)):
        assert check(aten.isin.Tensor_Tensor, values, values.flip(0).view(4, *shape), **kwargs)
    assert check(aten.isin.Tensor_Scalar, values, 2, **kwargs)
    assert check(aten.isin.Scalar_Tensor, 2, values, **kwargs)
