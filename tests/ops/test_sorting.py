"""Sorting against the loop, and refusals of data-dependent results."""

from __future__ import annotations

import pytest
import torch

import tsfunc.ops  # noqa: F401  (declares rows)
from tests.ops.harness import Level, check, compare, normal, plan, run_plan
from tsfunc.errors import DataDependentError
from tsfunc.ops.registry import find

aten = torch.ops.aten


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_sort(dim: int) -> None:
    x = normal(4, 5, 2)
    assert check(aten.sort.default, x, dim, True)
    ties = (x * 2).round()
    assert check(aten.sort.stable, ties, stable=True, dim=dim, descending=True)
    assert check(aten.argsort.stable, ties, stable=True, dim=dim)
    assert check(aten.argsort.default, x, dim)
    assert check(aten.topk.default, x, 2, dim)
    assert check(aten.topk.default, x, 1, dim, False, False)


def test_sort_with_defaults_and_without_dims() -> None:
    assert check(aten.sort.default, normal(4, 5))
    assert check(aten.sort.default, normal())
    assert check(aten.sort.stable, normal(), stable=True)
    assert check(aten.argsort.default, normal())
    assert check(aten.topk.default, normal(4, 5), 3)
    assert check(aten.topk.default, normal(), 1)
    assert check(aten.sort.default, normal(0, 5), 0)


REFUSED = [
    ("nonzero", "default", r"nonzero.*depends on the values"),
    ("_unique2", "default", r"_unique2.*torch\.where"),
    ("unique_consecutive", "default", "unique_consecutive"),
    ("_local_scalar_dense", "default", r"calling \.item\(\) on a Tensor"),
    ("item", "default", r"calling \.item\(\) on a Tensor"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_data_dependent_calls_are_refused(case: tuple[str, str, str]) -> None:
    name, overload, message = case
    op = getattr(getattr(aten, name), overload)
    found = find(op.name())
    assert found is not None and found.rule is not None
    with pytest.raises(DataDependentError, match=message):
        found.rule(op, Level(), [0], [normal(3)], {})


def test_comparing_whole_tensors_is_refused() -> None:
    found = find("aten::equal")
    assert found is not None and found.rule is not None
    with pytest.raises(DataDependentError, match="one Python bool"):
        found.rule(aten.equal.default, Level(), [0, None], [normal(3), normal(3)], {})


def test_repeat_interleave_of_known_size() -> None:
    counts = torch.tensor([2, 0, 3])
    assert check(aten.repeat_interleave.Tensor, counts, output_size=5)
    found = find("aten::repeat_interleave.Tensor")
    assert found is not None and found.rule is not None
    with pytest.raises(DataDependentError, match="output_size"):
        found.rule(aten.repeat_interleave.Tensor, Level(), [0], [counts.expand(3, 3)], {})


@pytest.mark.parametrize("size", [1, 3, 9])
def test_nonzero_of_known_size(size: int) -> None:
    x = torch.tensor([[0, 1, 2], [3, 0, 4]])
    row, op = find("aten::nonzero_static"), aten.nonzero_static.default
    assert row is not None
    for value in (x, x[0], torch.tensor(1.0)):
        for fill in (-1, 7):
            made = plan([value], {(0, None): value.dim()}, 3)
            assert run_plan(row, op, made, {"size": size, "fill_value": fill}, "nonzero_static")


@pytest.mark.parametrize("sequences", [None, 0])
def test_sorters_given_by_keyword(sequences: int | None) -> None:
    op, row = aten.searchsorted.Tensor, find("aten::searchsorted.Tensor")
    assert row is not None and row.rule is not None
    x = normal(3, 5) if sequences == 0 else normal(5).expand(3, 5)
    order, values = x.argsort(1), normal(3, 2)
    args = [x if sequences == 0 else x[0], values]
    bdims = [sequences, 0, {"sorter": 0}]
    out, bdim = row.rule(op, Level(), bdims, args, {"sorter": order})
    expected = [op(x[i].contiguous(), values[i], sorter=order[i]) for i in range(3)]
    compare(out, bdim, expected, "sorter")
