"""Look-ups of operators, and the messages for unknown names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import tsfunc
from tsfunc.bridge.tracers.schemas import registered_overloads
from tsfunc.errors import UnknownOperatorError
from tsfunc.ops import Category, all_rows, lookup
from tsfunc.ops.catalogue import lookup as module
from tsfunc.ops.catalogue.counts import CENSUS_2020, census_rows
from tsfunc.ops.catalogue.facts import ResultDims
from tsfunc.ops.catalogue.operator_table import read_table


def test_an_entry() -> None:
    entry = lookup("aten::addmm")
    assert entry.category is Category.FIXED
    assert entry.category.value == "Fixed"
    assert entry.source == "decided: vectors and matrices, with no batch dims or just one"
    assert entry.evidence.ranks == {"self": [0, 1, 2], "mat1": [2], "mat2": [2]}
    assert entry.facts.carriers == ("self", "mat1", "mat2")
    assert entry.facts.result is ResultDims.COMPUTED
    assert entry.rule is not None
    written = Path(entry.file).read_text().splitlines()[entry.line - 1 : entry.line + 2]
    assert any("addmm" in line for line in written)
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "aten::mm"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("aten::add.Tensor", "result", ResultDims.BROADCAST),
        ("aten::sum.dim_IntList", "result", ResultDims.REDUCED),
        ("aten::sum.dim_IntList", "dims", ("dim",)),
        ("aten::mse_loss", "result", ResultDims.REDUCED),
        ("aten::median", "result", ResultDims.REDUCED),
        ("aten::clone", "result", ResultDims.SAME),
        ("aten::nonzero", "result", ResultDims.DATA),
        ("aten::nonzero", "data_dependent", True),
        ("aten::masked_select.out", "data_dependent", True),
        ("aten::item", "data_dependent", True),
        ("aten::is_nonzero", "data_dependent", True),
        ("aten::add.Tensor", "data_dependent", False),
        ("aten::size.int", "result", ResultDims.NONE),
        ("aten::zeros", "carriers", ()),
        ("aten::new_zeros", "carriers", ()),
        ("aten::masked_fill.Tensor", "carriers", ("self", "mask")),
        ("aten::transpose.int", "dims", ("dim0", "dim1")),
        ("aten::transpose.int", "aliases", ("self",)),
        ("aten::transpose_copy.int", "aliases", ()),
        ("aten::add_.Tensor", "mutates", ("self",)),
        ("aten::max.dim_max", "mutates", ("max", "max_values")),
        ("aten::_native_batch_norm_legit", "mutates", ("running_mean", "running_var")),
        ("aten::rand_like", "random", True),
        ("aten::rand_like.out", "random", True),
        ("aten::dropout_", "random", True),
        ("aten::zeros_like", "random", False),
    ],
)
def test_facts_of_operators(name: str, field: str, value: Any) -> None:
    assert getattr(lookup(name).facts, field) == value


def test_an_operator_may_be_given_itself() -> None:
    assert lookup(torch.ops.aten.add.Tensor) == lookup("aten::add.Tensor")
    assert lookup(torch.ops.aten.is_nonzero) == lookup("aten::is_nonzero")  # of just one overload


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten::add.Tensr", "has no operator of this name. Similar names are: aten::add.Tensor, "),
        (
            "aten::add",
            "It has these overloads: aten::add.Scalar, aten::add.Scalar_out, ",
        ),
        ("add.Tensor", "Names begin with a namespace: aten::add.Tensor."),
        ("mylib::qqqqqqqqqqqqqq", "A custom operator must be defined first."),
    ],
)
def test_an_unknown_name(name: str, message: str) -> None:
    with pytest.raises(UnknownOperatorError) as found:
        lookup(name)
    assert str(found.value).startswith(f"lookup({name!r}): torch has no operator of this name.")
    assert message in str(found.value)
    assert isinstance(found.value, LookupError)


def test_objects_that_are_not_operators() -> None:
    with pytest.raises(UnknownOperatorError, match=r"lookup\(3\)"):
        lookup(3)


def test_the_rows_equal_the_lookups() -> None:
    available = set(registered_overloads("aten"))
    for name, row in all_rows().items():
        if name in available:
            assert lookup(name).rule is row.rule, name


def test_operators_and_census() -> None:
    every = tsfunc.ops.operators()
    assert len(every) == len(set(every)) > 3000
    flat = tsfunc.ops.operators(Category.FLATTEN)
    assert flat == tsfunc.ops.operators("Flatten")
    assert tsfunc.ops.census()[Category.FLATTEN] == len(flat)
    assert tsfunc.ops.census().total() == len(every)
    with pytest.raises(ValueError, match="'Flat' is not a valid Category"):
        tsfunc.ops.operators("Flat")


def test_the_counts_of_2020() -> None:
    assert sum(CENSUS_2020.values()) == 1364
    assert ("TensorIterator", 505) in [(label, then) for label, _, then in census_rows()]
    assert ("Other", None) in [(label, then) for label, _, then in census_rows()]


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a torch with overloads that the table lacks."""
    gone = ("aten::sin", "aten::sin.out", "aten::mm", "aten::nonzero", "aten::frac", "aten::sgn_")
    table = {name: line for name, line in read_table().items() if name not in gone}
    monkeypatch.setattr(module, "read_table", lambda: table)
    monkeypatch.setattr(module, "_found", {})


@pytest.mark.usefixtures("another_torch")
@pytest.mark.parametrize(
    ("name", "category", "source"),
    [
        ("aten::sin", "TensorIterator", "tag: pointwise"),
        ("aten::sin.out", "TensorIterator", "follows aten::sin"),
        ("aten::sgn_", "TensorIterator", "follows aten::sgn"),
        ("aten::mm", "Fixed", "decided: vectors and matrices, with no batch dims or just one"),
        ("aten::nonzero", "Dynamic", "tag: dynamic_output_shape"),
    ],
)
def test_an_overload_that_the_table_does_not_know(name: str, category: str, source: str) -> None:
    entry = lookup(name)
    assert (entry.category.value, entry.source) == (category, source)


def test_operators_of_torch_beside_aten() -> None:
    entry = lookup("prims::sin")
    assert isinstance(entry.category, Category)
    assert entry.source
