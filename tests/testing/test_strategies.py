"""The strategies generate the documented values, of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tsfunc import MetaTensorType, ops, pytrees, specialize
from tsfunc.testing import check_vmap, strategies

SOME = settings(max_examples=25, database=None, deadline=None)
FEW = settings(
    max_examples=10, database=None, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@SOME
@given(strategies.tensors(strategies.DTYPES, min_rank=1, max_rank=2, max_size=3, low=-1, high=1))
def test_drawn_tensors_have_the_requested_properties(x: Tensor) -> None:
    assert 1 <= x.dim() <= 2 and all(1 <= size <= 3 for size in x.shape)
    assert x.dtype in strategies.DTYPES
    wide = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    assert (wide.double().abs() <= 1).all()


def test_tensors_come_in_every_layout() -> None:
    two = strategies.tensors(shape=(3, 4))
    find(two, lambda x: x.is_contiguous())
    find(two, lambda x: x.stride() == (1, 3))
    find(two, lambda x: x.stride(0) == 0)
    find(two, lambda x: x.stride(1) == 2)
    find(two, lambda x: x.storage_offset() > 0)


@SOME
@given(strategies.batches(strategies.tensors(max_rank=2), size=3))
def test_batches_have_their_examples_along_a_dim(batch: Any) -> None:
    x, dim = batch
    assert x.shape[dim] == 3
    check_vmap(lambda x: x.sin() * 2, x, in_dims=(dim,))


@SOME
@given(strategies.pytrees(strategies.tensors(max_rank=1)))
def test_pytrees_have_the_leaves(tree: Any) -> None:
    assert all(isinstance(leaf, Tensor) for leaf in pytrees.leaves_of(tree))


@FEW
@given(st.data())
def test_arguments_that_fit_a_description_are_accepted(data: st.DataObject) -> None:
    descriptor = data.draw(strategies.descriptors(max_rank=2))
    assert isinstance(descriptor, MetaTensorType)
    x = data.draw(strategies.described(descriptor))
    program = specialize(lambda x: x.sin(), {"x": descriptor})
    assert torch.equal(program(x), x.sin())


def test_sizes_of_equal_names_are_equal() -> None:
    square = MetaTensorType(["n", "n"], dtype=torch.float32)
    x = find(strategies.described(square), lambda x: x.shape[0] > 1)
    assert x.shape[0] == x.shape[1]
    assert find(strategies.described(square, {"n": 5}), lambda x: True).shape == (5, 5)


@pytest.mark.filterwarnings("ignore")  # deprecated operators are operators, too
@pytest.mark.parametrize("category", ["TensorIterator", "N-Dimensional", "Fixed"])
def test_calls_of_operators_are_taken(category: str) -> None:
    @FEW
    @given(strategies.operator_calls(category))
    def check(call: strategies.OperatorCall) -> None:
        assert ops.category_of(call.name) is ops.Category(category)
        call()

    check()
