"""The five places of the proposal where types are checked, each violated once."""

from __future__ import annotations

from typing import Callable, List  # noqa: UP035

import pytest
import torch
from torch import Tensor

from tsfunc.errors import AnnotationError, TypeCheckError
from tsfunc.types import (
    ANY,
    INT,
    TSModuleType,
    attribute_type,
    check,
    check_carry,
    join_branches,
    of_value,
    parse,
    schema_of,
    signature,
)


def test_annotations_are_types() -> None:
    def f(x: Callable[[int], int]) -> None: ...

    with pytest.raises(AnnotationError, match=r"f: parameter x: .* is not a type of the language"):
        signature(f)


def test_a_symbol_keeps_its_type_where_control_flow_joins() -> None:
    with pytest.raises(TypeCheckError, match=r"cond: its branches return.*\n  yes: int\n  no: str"):
        join_branches({"yes": of_value(1), "no": of_value("a")})
    with pytest.raises(TypeCheckError, match=r"the carry changes:\n.*first step: int\n.*: float\n"):
        check_carry(of_value(1), of_value(1.0))


def test_constructors_make_one_schema() -> None:
    class Net(torch.nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.weight = torch.ones(2)
            if bias:
                self.bias = torch.ones(2)

    one, other = Net(True), Net(False)
    assert schema_of(one) != schema_of(other)
    (mismatch,) = check(other, of_value(one), "net")
    assert str(mismatch) == "net.bias: expected Tensor, got no such attribute"


def test_parameters_are_bound_and_variables_assigned_by_type() -> None:
    def f(x: Tensor, sizes: List[int]) -> None: ...  # noqa: UP006

    found = [str(m) for m in signature(f).check(torch.ones(1), [1, "a"])]
    assert found == ["sizes[1]: expected int, got 'a' (str)"]
    assert [str(m) for m in check(1.0, INT, "n")] == ["n: expected int, got 1.0 (float)"]


def test_attributes_are_those_of_the_type() -> None:
    with pytest.raises(TypeCheckError, match="x is of type Tensor, which has no 'wieght'"):
        attribute_type(parse("Tensor"), "wieght", of="x")
    with pytest.raises(TypeCheckError, match="x is of type Any, of which nothing is known"):
        attribute_type(ANY, "__add__", of="x")


def test_the_type_of_a_module_is_no_annotation() -> None:
    assert isinstance(of_value(torch.nn.ReLU()), TSModuleType)
    with pytest.raises(AnnotationError, match="neither a word of the grammar nor a class"):
        parse(str(of_value(torch.nn.ReLU())).replace("torch.nn.modules.activation.ReLU", "ReLU"))
