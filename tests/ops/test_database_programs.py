"""The operator database as programs that name every size that may change.

A program that is traced for one sample must agree with the operator at three other sizes, and with
a named size of 0 or 1.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.ops.database import Row
from tests.ops.named_dims import at_shapes, named, named_by_size
from tests.ops.named_exceptions import EXCEPTIONS
from tests.ops.named_sweep import NAMED_APART, NAMED_BY_SIZE, WAYS, entries, sweep, type_of
from tests.ops.sweep import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "coverage_named.md"
QUICK = {
    NAMED_APART: "add mm cat sum fft.fft softmax linalg.solve where diag transpose "
    "nn.functional.linear nn.functional.layer_norm",
    NAMED_BY_SIZE: "bmm cov istft combinations unfold_copy diagonal_copy nn.functional.group_norm "
    "nn.functional.gaussian_nll_loss nn.functional.ctc_loss nn.functional.interpolate.nearest",
}
ROWS = {row.name: row for row in entries()}


def run(row: Row, way: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(sweep(row, type_of(row), way, 2))
    return [f"{x.what} {x.message}" for x in found if x.verdict > Verdict.OK]


@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way, names in QUICK.items() for name in names.split()]
)
def test_some_entries(way: str, name: str) -> None:
    assert run(ROWS[name], way) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
def test_every_entry(name: str, way: str) -> None:
    if name in EXCEPTIONS:
        pytest.skip(f"{name}: {EXCEPTIONS[name]}")
    assert run(ROWS[name], way) == []


def test_the_exceptions_are_those_of_the_page() -> None:
    listed = dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert listed == EXCEPTIONS
    assert EXCEPTIONS.keys() <= ROWS.keys()
    assert len(EXCEPTIONS) <= 0.02 * len(ROWS)


def test_names_are_found_by_asking() -> None:
    case = next(iter(ROWS["mm"].cases(torch.float32, 1)))
    found = named(case)
    assert found is not None and len(found.others) == 3
    names = found.names
    assert names[0, 1] == names[1, 0] and len(set(names.values())) == 3
    inputs = at_shapes(case.tensors, found.others[0])
    assert [tuple(x.shape) for x in inputs] == [tuple(shape) for shape in found.others[0]]


def test_equal_sizes_have_one_name() -> None:
    case = next(iter(ROWS["bmm"].cases(torch.float32, 1)))
    found = named_by_size(case)
    assert found is not None and len(found.others) == 3
    for place, name in found.names.items():
        same = [p for p, other in found.names.items() if other == name]
        assert {case.tensors[i].shape[d] for i, d in same} == {
            case.tensors[place[0]].shape[place[1]]
        }
    assert any(0 in shape for shapes in found.small for shape in shapes)
