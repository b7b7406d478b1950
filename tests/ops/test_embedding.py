"""Bags of embeddings and their gradients against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
import tsfunc.ops
from tests.ops.harness import Level, check, compare, uniform
from tsfunc.ops.registry import find

aten = torch.ops.aten


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [-1, 3])
def test_embedding_bag(mode: int, padding: int) -> None:
    weight, index = uniform(6, 4), torch.tensor([1, 3, 2, 0, 5, 4])
    bags = torch.tensor([0, 2, 5])
    rest: tuple[Any, ...] = (False, mode, False, None, False, padding)
    choices = [(0,), (1,), (0, 1)]
    assert check(aten._embedding_bag.default, weight, index, bags, *rest, choices=choices)
    scales: Tensor | None = uniform(6)
    if mode == 0:
        rest = (False, mode, False, scales, False, padding)
        assert check(aten._embedding_bag.default, weight, index, bags, *rest, choices=[(1, 3)])
    else:
        scales = None
    out, to_bag, sizes, largest = aten._embedding_bag(weight, index, bags, *rest)
    backward = aten._embedding_bag_backward.default
    args: tuple[Any, ...] = (
        uniform(*out.shape),
        index,
        bags,
        to_bag,
        sizes,
        largest,
        6,
        False,
        mode,
        False,
    )
    if to_bag.numel() == 0:
        to_bag = torch.tensor([0, 0, 1, 1, 1, 2])
        args = (*args[:3], to_bag, *args[4:])
    assert check(backward, *args, scales, padding, choices=[(0,)])
    scales_backward = aten._embedding_bag_per_sample_weights_backward.default
    if mode == 0:
        args = (uniform(*out.shape), weight, index, bags, to_bag, mode, padding)
        assert check(scales_backward, *args, choices=[(0,), (1,), (2,), (0, 1, 2)])


def test_last_offset() -> None:
    weight, index = uniform(6, 4), torch.tensor([1, 3, 2, 0, 5, 4])
    whole = torch.tensor([0, 2, 5, 6])
    found = find("aten::_embedding_bag")
    assert found is not None and found.rule is not None
    indices = torch.stack([index, index.flip(0)])
    options = (False, 1, False, None, True)
    op = aten._embedding_bag.default
    args = [weight, indices, whole, *options]
    outs, dims = found.rule(op, Level(2), [None, 0, None], args, {})
    expected = [op(weight, i, whole, *options)[:1] for i in indices]
    compare(outs[:1], dims[:1], expected, "bags")


def test_renorm_writes_the_rows_looked_up() -> None:
    choices = [(0,), (0, 1)]
    args = (uniform(6, 4), torch.tensor([1, 3]), 0.5, 2.0)
    assert check(aten.embedding_renorm_.default, *args, choices=choices)


@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("padding", [None, 2, -7])
@pytest.mark.parametrize("own", ["table", "indices", "both"])
def test_gradients_of_tables(own: str, padding: int | None, by_frequency: bool) -> None:
    tables, indices = uniform(3, 7, 4), torch.tensor([[2, 0, 4, 4], [1, 2, 2, 0], [6, 2, 0, 0]])

    def total(table: Tensor, index: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(index, table, padding, scale_grad_by_freq=by_frequency)
        return (rows * torch.arange(4.0)).sum()

    table_at, index_at = {"table": (0, None), "indices": (None, 0), "both": (0, 0)}[own]
    table, index = (
        (tables if table_at == 0 else tables[0]),
        (indices if index_at == 0 else indices[0]),
    )
    each = [
        tsfunc.grad(total)(
            table if table_at is None else table[i], index if index_at is None else index[i]
        )
        for i in range(3)
    ]
    want = torch.stack(each)
    torch.testing.assert_close(
        tsfunc.vmap(tsfunc.grad(total), (table_at, index_at))(table, index), want
    )
    outside = tsfunc.grad(
        lambda table: tsfunc.vmap(total, (table_at, index_at))(table, index).sum()
    )
    torch.testing.assert_close(outside(table), want if table_at == 0 else want.sum(0))


def test_tangents_of_a_row_that_is_padding() -> None:
    tables, indices = uniform(2, 3, 4), torch.tensor([[0, 1], [1, 2]])

    def looked_up(tables: Tensor) -> Tensor:
        function = torch.nn.functional.embedding
        return tsfunc.vmap(lambda index, table: function(index, table, 1))(indices, tables)

    _, tangent = tsfunc.jvp(looked_up, (tables,), (2 * tables,))
    torch.testing.assert_close(tangent, 2 * looked_up(tables))
