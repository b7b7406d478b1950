"""parse and str are inverses, and errors show the text and the position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.types.strategies import Base, Color, types
from tsfunc.errors import AnnotationError
from tsfunc.types import (
    ANY,
    BOOL,
    DOUBLE,
    FLOAT,
    INT,
    NONE,
    STR,
    TENSOR,
    Dim,
    MetaTensorType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFuture,
    TSList,
    TSNamedTuple,
    TSOptional,
    TSRRef,
    TSTensor,
    TSTuple,
    TSType,
    parse,
)

META = MetaTensorType(["n", 64], dtype=torch.float32, device="cpu")


@given(types())
def test_parse_is_the_inverse_of_str(type_: TSType) -> None:
    assert parse(str(type_)) == type_
    assert hash(parse(str(type_))) == hash(type_)


@pytest.mark.slow
@given(types())
@settings(max_examples=10_000)
def test_parse_is_the_inverse_of_str_for_ten_thousand_types(type_: TSType) -> None:
    assert parse(str(type_)) == type_


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("Any", ANY),
        ("int", INT),
        ("float", FLOAT),
        ("double", DOUBLE),
        ("bool", BOOL),
        ("str", STR),
        ("None", NONE),
        ("Tensor", TENSOR),
        ("Tuple[int, Tensor]", TSTuple((INT, TENSOR))),
        ("Tuple[()]", TSTuple(())),
        ("namedtuple(x: int, y: List[str])", TSNamedTuple(("x", "y"), (INT, TSList(STR)))),
        ("List[int]", TSList(INT)),
        ("Dict[str, Tensor]", TSDict(STR, TENSOR)),
        ("Optional[int]", TSOptional(INT)),
        ("Future[int]", TSFuture(INT)),
        ("RRef[Optional[int]]", TSRRef(TSOptional(INT))),
        ("torch.device", TSBuiltinClass(torch.device)),
        ("torch.nn.Parameter", TSTensor(torch.nn.Parameter)),
        ("f32[n, 64] cpu", TSTensor(meta=META)),
        ("List[f32[n, 64] cpu]", TSList(TSTensor(meta=META))),
        ("bool[2<=n<=4, m>=1, k<=3]", TSTensor(meta=MetaTensorType(
            [Dim("n", 2, 4), Dim("m", 1), Dim("k", None, 3)], dtype=torch.bool))),
        ("tensor[?, 2 * n + 1]", TSTensor(meta=MetaTensorType([None, "2*n+1"]))),
        ("tensor[]", TSTensor(meta=MetaTensorType(rank=0))),
        ("f64[...] cuda:1 requires_grad sparse_coo", TSTensor(meta=MetaTensorType(
            float, device="cuda:1", requires_grad=True, layout=torch.sparse_coo))),
        (f"Annotated[torch.nn.Parameter, {META}]", TSTensor(torch.nn.Parameter, META)),
        ("tests.types.strategies.Base", TSCustomClass(Base)),
        ("tests.types.strategies.Color", TSEnum(Color)),
    ],
)  # fmt: skip
def test_a_type_as_it_is_written(text: str, type_: TSType) -> None:
    assert parse(text) == type_
    assert str(type_) == text


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        # The spelling of the proposal: a comma after each element, no names in named tuples.
        ("Tuple[int, float,]", "Tuple[int, float]"),
        ("namedtuple(int, Tensor,)", "namedtuple(_0: int, _1: Tensor)"),
        ("torch.tensor", "Tensor"),
        # Python's own spelling.
        ("typing.List[torch.Tensor]", "List[Tensor]"),
        ("dict[str, tuple[int, str]]", "Dict[str, Tuple[int, str]]"),
        ("int | None", "Optional[int]"),
        ("None | Tuple[int] | None", "Optional[Tuple[int]]"),
        ("Union[int, None]", "Optional[int]"),
        ("Optional[Optional[int]]", "Optional[int]"),
        ("Optional[None]", "None"),
        ("Optional[Any]", "Any"),
        ("Union[int, Any]", "Any"),
        ("tensor[...]", "Tensor"),
        ("  List [ int ] ", "List[int]"),
    ],
)
def test_other_spellings(text: str, normal: str) -> None:
    assert str(parse(text)) == normal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a valid type: expected a type, got 'the end'"),
        ("List[int", r"expected '\]' or ',', got ''"),
        ("List[int]]", r"expected the end of the type, got '\]'"),
        ("List", r"List needs the types of its elements: write List\[\.\.\.\]"),
        ("List[int, str]", "List: expected one type, got 2"),
        ("Dict[int]", r"Dict: expected a key and a value type, got 1 type\(s\)"),
        ("Dict[Tuple[int], int]", "keys of a dict are str, int, float, bool, Tensor or Any, not T"),
        ("int | str", "a union of int and str: the language has no unions but with None"),
        ("nowhere.Model", r"nowhere\.Model is neither a word .*parse\(text, \{'nowhere': \.\.\.\}"),
        ("os.path", "is not a type of the language"),
        ("namedtuple[int]", r"expected '\(' after namedtuple, got '\[int\]'"),
        ("namedtuple(a: int, a: int)", "expected a different name for each element"),
        ("namedtuple(int int)", r"expected ',' or '\)', got 'int\)'"),
        ("f32[-1]", "expected a size of 0 or more, got -1|neither a name nor"),
        ("f32[n", r"expected '\]' after the dims"),
        ("f32[n] nodevice", "expected a device of torch.*got 'nodevice'"),
        ("f32[n] cpu meta", "meta is the second device of one tensor"),
        ("Annotated[int, f32[n]]", "Annotated has a tensor class and a description"),
        ("Callable[[int], int]", "Callable is neither a word"),
        ("List[" * 2000, "nested too deeply for a type"),
        (3, r"parse\(text\): expected a str, got 3"),
    ],
)
def test_values_that_are_not_types(text: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        parse(text)


def test_names_are_looked_up_in_the_scope_first() -> None:
    class Local: ...

    scope: dict[str, object] = {"Local": Local, "Color": Color, "mine": Base, "Pair": list[int]}
    assert parse("List[Local]", scope) == TSList(TSCustomClass(Local))
    assert parse("Tuple[mine, Color]", scope) == TSTuple((TSCustomClass(Base), TSEnum(Color)))
    assert parse("Optional[Pair]", scope) == TSOptional(TSList(INT))
    assert parse("int", {"int": Local}) == TSCustomClass(Local)


def test_classes_that_can_not_be_found_by_name_keep_theirs() -> None:
    def make() -> type:
        class Local: ...

        return Local

    one, other = TSCustomClass(make()), TSCustomClass(make())
    assert str(one) != str(other)
    assert parse(f"Tuple[{one}, {other}]") == TSTuple((one, other))
    odd = TSCustomClass(type("no name [", (), {"__module__": "no module"}))
    assert parse(str(odd)) == odd


@pytest.mark.parametrize("text", ["f32[n, 64] cpu", "tensor[...]", "i64[] no_grad"])
def test_a_description_of_a_tensor_reads_back(text: str) -> None:
    assert str(MetaTensorType.parse(text)) == text


@pytest.mark.parametrize("text", ["int", "torch.nn.Parameter", "List[f32[n]]"])
def test_descriptors_of_non_tensors(text: str) -> None:
    with pytest.raises(
        AnnotationError, match=r"not describe a tensor; write for example f32\[n, 64"
    ):
        MetaTensorType.parse(text)
