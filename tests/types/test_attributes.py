"""attribute_type: attributes that are read from a type must exist in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import pytest
import torch
from torch import Tensor

from tests.types.strategies import Color, Encoder, Level
from tsfunc.errors import TypeCheckError
from tsfunc.types import (
    ANY,
    INT,
    STR,
    TENSOR,
    TSCustomClass,
    TSEnum,
    TSModuleInterface,
    TSType,
    attribute_type,
    from_annotation,
    of_value,
    parse,
)
from tsfunc.types.signatures import Signature


class Model(torch.nn.Module):
    width: int
    depth = 3
    untold: nowhere  # type: ignore[name-defined]  # noqa: F821

    def forward(self, x: Tensor, n: int = 1) -> Tensor:
        return x

    @property
    def size(self) -> Optional[int]:  # noqa: UP045
        return None

    @functools.cached_property
    def area(self) -> float:
        return 1.0

    @property
    def quiet(self):  # type: ignore[no-untyped-def]
        return 1

    @staticmethod
    def make(n: int) -> Tensor:
        return torch.ones(n)


@dataclass
class Record:
    n: int
    x: Tensor


class Slots:
    __slots__ = ("a",)


class Pair(NamedTuple):
    x: Tensor
    n: int


MODEL = TSCustomClass(Model)


@pytest.mark.parametrize(
    ("type_", "name", "found"),
    [
        (TENSOR, "shape", "torch.Size"), (TENSOR, "dtype", "torch.dtype"),
        (TENSOR, "requires_grad", "bool"), (TENSOR, "ndim", "int"), (TENSOR, "T", "Tensor"),
        (TENSOR, "grad", "Optional[Tensor]"), (TENSOR, "imag", "Tensor"),
        (TENSOR, "grad_fn", "Any"),
        (parse("torch.nn.Parameter"), "shape", "torch.Size"),
        (from_annotation(Pair), "n", "int"), (from_annotation(Pair), "x", "Tensor"),
        (MODEL, "width", "int"), (MODEL, "depth", "int"), (MODEL, "untold", "Any"),
        (MODEL, "size", "Optional[int]"), (MODEL, "area", "float"), (MODEL, "quiet", "Any"),
        (MODEL, "training", "bool"), (TSCustomClass(Record), "x", "Tensor"),
        (TSCustomClass(Slots), "a", "Any"),
        (TSEnum(Color), "value", "str"), (TSEnum(Color), "name", "str"),
        (TSEnum(Level), "value", "int"),
    ],
)  # fmt: skip
def test_types_of_attributes(type_: TSType, name: str, found: str) -> None:
    assert attribute_type(type_, name) == parse(found)


@pytest.mark.parametrize(
    ("type_", "name", "found"),
    [
        (MODEL, "forward", f"forward(self: {__name__}.Model, x: Tensor, n: int = 1) -> Tensor"),
        (MODEL, "make", "make(n: int) -> Tensor"),
        (TSModuleInterface(Encoder), "encode",
         "encode(self: tests.types.strategies.Encoder, x: Tensor, depth: int) -> Tensor"),
        (TENSOR, "sin", "sin(*args: Any, **kwargs: Any)"),
        (INT, "__add__", "__add__(*args: Any, **kwargs: Any)"),
        (parse("List[int]"), "append", "append(*args: Any, **kwargs: Any)"),
        (parse("Future[int]"), "wait", "wait(*args: Any, **kwargs: Any) -> int"),
        (parse("RRef[str]"), "to_here", "to_here(*args: Any, **kwargs: Any) -> str"),
    ],
)  # fmt: skip
def test_signatures_of_methods(type_: TSType, name: str, found: str) -> None:
    resolved = attribute_type(type_, name)
    assert isinstance(resolved, Signature) and str(resolved) == found


@pytest.mark.parametrize(
    ("type_", "name", "message"),
    [
        (ANY, "shape", r"^x\.shape: x is of type Any, of which nothing is known, .*concrete type"),
        (ANY, "__add__", r"^x\.__add__: x is of type Any"),
        (parse("Optional[Tensor]"), "shape", r"^x\.shape: .*may be None; test `x is not None` fir"),
        (INT, "shape", r"^x\.shape: x is of type int, which has no 'shape'"),
        (INT, "append", "which has no 'append'"),
        (STR, "__sub__", "which has no '__sub__'"),
        (TENSOR, "nothing", "x is of type Tensor, which has no 'nothing'"),
        (parse("List[int]"), "shape", r"of type List\[int\], which has no 'shape'"),
        (parse("Dict[str, int]"), "append", "which has no 'append'"),
        (parse("Tuple[int]"), "append", "which has no 'append'"),
        (from_annotation(Pair), "z", "which has no 'z'"),
        (parse("RRef[int]"), "z", "which has no 'z'"),
        (parse("Future[int]"), "z", "which has no 'z'"),
        (MODEL, "missing", "Model, which has no 'missing'"),
        (TSModuleInterface(Encoder), "width", "Encoder, which has no 'width'"),
        (TSEnum(Color), "GREEN", "Color, which has no 'GREEN'"),
        (parse("torch.device"), "shape", r"torch\.device, which has no 'shape'"),
    ],
)
def test_missing_values(type_: TSType, name: str, message: str) -> None:
    with pytest.raises(TypeCheckError, match=message):
        attribute_type(type_, name, of="x")


def test_the_attributes_of_one_module() -> None:
    type_ = of_value(torch.nn.Linear(2, 3))
    assert attribute_type(type_, "in_features") == INT
    assert attribute_type(type_, "weight") == TENSOR
    assert isinstance(attribute_type(type_, "forward"), Signature)
    with pytest.raises(TypeCheckError, match=r"Linear.* which has no 'scale'"):
        attribute_type(type_, "scale")


def test_a_method_whose_annotations_are_no_types() -> None:
    class Odd:
        def method(self, x: list) -> Any: ...  # type: ignore[type-arg]

    with pytest.raises(
        TypeCheckError, match=r"^x\.method: method: parameter x: list needs the types"
    ):
        attribute_type(TSCustomClass(Odd), "method", of="x")
