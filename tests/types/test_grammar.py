"""The types themselves: their composition, and normal forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from tests.types.strategies import types
from tsfunc.errors import AnnotationError
from tsfunc.types import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    NONE,
    STR,
    TENSOR,
    TSDict,
    TSFuture,
    TSList,
    TSModuleType,
    TSNamedTuple,
    TSOptional,
    TSRRef,
    TSTuple,
    TSType,
    optional,
)

MODULE: Any = TSModuleType(torch.nn.Linear, (("in_features", INT), ("weight", TENSOR)))


def test_the_type_of_a_module_shows_its_schema() -> None:
    assert str(MODULE) == "torch.nn.modules.linear.Linear(in_features: int, weight: Tensor)"
    assert not isinstance(MODULE, TSType)


@pytest.mark.parametrize(
    "compose",
    [
        TSList,
        TSOptional,
        TSFuture,
        TSRRef,
        optional,
        pytest.param(lambda t: TSTuple((INT, t)), id="TSTuple"),
        pytest.param(lambda t: TSDict(STR, t), id="TSDict"),
        pytest.param(lambda t: TSNamedTuple(("a",), (t,)), id="TSNamedTuple"),
    ],
)
def test_the_type_of_a_module_composes_with_nothing(compose: Any) -> None:
    with pytest.raises(AnnotationError, match=r"be part of another type.*use the class itself"):
        compose(MODULE)


@pytest.mark.parametrize("compose", [TSList, TSOptional, TSFuture, TSRRef])
def test_classes_are_no_types(compose: Any) -> None:
    with pytest.raises(
        AnnotationError, match=r"expected types of tsfunc.types, got <class 'int'>.*from_annot"
    ):
        compose(int)


@pytest.mark.parametrize("key", [STR, INT, FLOAT, BOOL, TENSOR, ANY])
def test_keys_of_a_dict(key: TSType) -> None:
    assert TSDict(key, INT).key == key


@pytest.mark.parametrize("key", [NONE, TSList(INT), TSOptional(INT)])
def test_values_that_can_not_be_keys(key: TSType) -> None:
    with pytest.raises(AnnotationError, match="the keys of a dict are str, int, float, bool, Ten"):
        TSDict(key, INT)


@pytest.mark.parametrize("element", [NONE, ANY, TSOptional(INT)])
def test_types_that_are_optional_already(element: TSType) -> None:
    assert optional(element) is element
    with pytest.raises(AnnotationError, match=r"Optional\[.*\] is .*: write that"):
        TSOptional(element)


def test_names_of_a_named_tuple() -> None:
    with pytest.raises(AnnotationError, match=r"got names \['a'\] for 2 element"):
        TSNamedTuple(("a",), (INT, INT))


@given(types())
def test_a_type_is_its_children_put_together(type_: TSType) -> None:
    assert type_.rebuilt(type_.parts) == type_
