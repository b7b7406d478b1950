"""Annotations that users write, and the descriptors that they are read into."""

# The tests cover both of typing's styles, so neither may be turned into the other.
# ruff: noqa: UP006, UP007, UP045

from __future__ import annotations

import math
import typing
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple, Union  # noqa: UP035

import pytest
import torch
from hypothesis import given

from tests.types.strategies import Color, Encoder, types
from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types import (
    ANY,
    FLOAT,
    INT,
    NONE,
    STR,
    TENSOR,
    MetaTensorType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFields,
    TSFuture,
    TSList,
    TSModuleInterface,
    TSNamedTuple,
    TSPytree,
    TSRRef,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSType,
    TSUnion,
    Value,
    as_descriptor,
    parse,
    parse_descriptor,
)
from tsfunc.types.contract import tensor_leaves
from tsfunc.types.values import Attribute

State = namedtuple("State", ["weight", "step"])
META = MetaTensorType(["n"], dtype=float)
ANY_TENSOR = MetaTensorType()
DESCRIBED = TSTensor(meta=META)


@dataclass
class Batch:
    x: META  # type: ignore[valid-type]
    scale: float = 1.0
    tail: Optional[Batch] = None


class Fields(typing.NamedTuple):
    x: META  # type: ignore[valid-type]
    rest: List[META]  # type: ignore[valid-type]
    call: typing.Callable[[], int]


class Config(typing.TypedDict):
    width: int


class Sized(typing.Protocol):
    size: int


@pytest.mark.parametrize(
    ("written", "descriptor"),
    [
        (META, DESCRIBED),
        (torch.Tensor, TENSOR),
        (MetaTensorType, TENSOR),
        (int, INT),
        (torch.nn.Module, TSCustomClass(torch.nn.Module)),
        (type(None), NONE),
        (None, NONE),
        (Any, ANY),
        ("sum", Value("sum")),
        (torch.float32, Value(torch.float32)),
        (List, TSList(ANY)),
        (List[int], TSList(INT)),
        (list[int], TSList(INT)),
        (List[META], TSList(DESCRIBED)),  # type: ignore[valid-type]
        (list[META], TSList(DESCRIBED)),  # type: ignore[valid-type]
        (List[MetaTensorType], TSList(TENSOR)),
        (Dict, TSDict(ANY, ANY)),
        (Dict[str, META], TSDict(STR, DESCRIBED)),  # type: ignore[valid-type]
        (dict[str, int], TSDict(STR, INT)),
        (Tuple, TSTupleOf(ANY)),
        (Tuple[META, ...], TSTupleOf(DESCRIBED)),
        (tuple[int, META], TSTuple((INT, DESCRIBED))),  # type: ignore[valid-type]
        (Tuple[()], TSTuple(())),
        (Optional[META], TSUnion((DESCRIBED, NONE))),
        (META | None, TSUnion((DESCRIBED, NONE))),
        (None | META, TSUnion((NONE, DESCRIBED))),
        (int | META, TSUnion((INT, DESCRIBED))),
        (int | None, TSUnion((INT, NONE))),
        (Union[int, str], TSUnion((INT, STR))),
        (Literal["sum", 3], TSUnion((Value("sum"), Value(3)))),
        (Annotated[int, "width"], INT),
        (Annotated[torch.Tensor, META], DESCRIBED),
        (Annotated[torch.nn.Parameter, META], TSTensor(torch.nn.Parameter, META)),
        (torch.nn.Parameter, TSTensor(torch.nn.Parameter)),
        (Fields, TSPytree(Fields, (0, 1, 2), (DESCRIBED, TSList(DESCRIBED), ANY))),
        (State, TSPytree(State, (0, 1), (ANY, ANY))),
        (Encoder, TSModuleInterface(Encoder)),
        (torch.futures.Future[META], TSFuture(TSTensor(meta=META))),  # type: ignore[valid-type]
        # types of the language
        (parse("Any"), ANY),
        (parse("None"), NONE),
        (parse("double"), FLOAT),
        (parse("f64[n]"), DESCRIBED),
        (parse("List[f64[n]]"), TSList(DESCRIBED)),
        (parse("Dict[str, f64[n]]"), TSDict(STR, DESCRIBED)),
        (parse("Optional[f64[n]]"), TSUnion((DESCRIBED, NONE))),
        (parse("Tuple[f64[n], int]"), TSTuple((DESCRIBED, INT))),
        (parse("namedtuple(a: f64[n])"), TSNamedTuple(("a",), (DESCRIBED,))),
        (parse("RRef[int]"), TSRRef(INT)),
        (parse("torch.nn.Parameter"), TSTensor(torch.nn.Parameter)),
        (parse("torch.device"), TSBuiltinClass(torch.device)),
        (parse("tests.types.strategies.Color"), TSEnum(Color)),
        # instances of dataclasses
        (Batch(META, 2.0), TSFields(Batch, ("x", "scale", "tail"),
                                    (DESCRIBED, Value(2.0), NONE))),
        (Batch(None, float), TSFields(Batch, ("x", "scale", "tail"),  # type: ignore[arg-type]
                                      (NONE, FLOAT, NONE))),
        ((META, 3), TSTuple((DESCRIBED, Value(3)))),
        ([int], TSPytree(list, (0,), (INT,))),
        ({"w": META}, TSPytree(dict, ("w",), (DESCRIBED,))),
        (OrderedDict(w=META), TSPytree(dict, ("w",), (DESCRIBED,))),
        (State(META, int), TSPytree(State, (0, 1), (DESCRIBED, INT))),
        (deque([META]), TSPytree(deque, (0,), (DESCRIBED,))),
        ([[META], {}], TSPytree(list, (0, 1), (TSPytree(list, (0,), (DESCRIBED,)),
                                               TSPytree(dict, (), ())))),
    ],
)  # fmt: skip
def test_descriptors_are_read(written: object, descriptor: object) -> None:
    read = as_descriptor(written)
    assert read == descriptor
    assert hash(read) == hash(descriptor)
    assert as_descriptor(read) is read


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (Optional, r"x: typing\.Optional can't be checked at a call; give a MetaTensorType, a cl"),
        (typing.Callable[[int], int], r"x: typing\.Callable.* can't be checked at a call"),
        (deque[int], r"x: collections\.deque\[int\] can't be checked at a call"),
        (List["n"], r"x\[\.\.\.\]: ForwardRef\('n'\) can't be"),  # type: ignore[name-defined]  # noqa: F821
        ({"w": [typing.TypeVar("T")]}, r"x\['w'\]\[0\]: ~T can't be"),
        (State(1, Optional), r"x\.step: typing\.Optional can't be"),
        (Config, r"x: Config can't be checked at a call: TypedDict"),
        (Sized, r"x: interface Sized may have abstract methods .* it has the attribute size"),
        (dict[META, int], r"x: expected keys of a dict that are not tensors, got f64\[n\]"),  # type: ignore[valid-type]
    ],
)
def test_bad_descriptors_are_refused(written: object, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        as_descriptor(written, "x")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (Optional[List[META]], "List[f64[n]] | None"),  # type: ignore[valid-type]
        ({"a": (int, 3), 3: [], (1, "b"): ()},
         "{'a': Tuple[int, Literal[3]], 3: [], (1, 'b'): Tuple[()]}"),
        (State(META, Any), f"{__name__}.State(weight: f64[n], step: Any)"),
        (Dict[str, Tuple[int, ...]], "Dict[str, Tuple[int, ...]]"),
        ([[META], [Tuple[Tuple[int, ...]]]], "[[f64[n]], [Tuple[Tuple[int, ...]]]]"),
        (Literal["sum", 3, None], "Literal['sum'] | Literal[3] | None"),
        ("it's \"]\\", "Literal['it\\'s \"]\\\\']"),
        ([1.5, -1e-9, math.inf, -math.inf, 2j, b"a", True, (1, 2)],
         "[Literal[1.5], Literal[-1e-09], Literal[inf], Literal[-inf], Literal[2j], "
         "Literal[b'a'], Literal[True], Tuple[Literal[1], Literal[2]]]"),
        ((torch.float32, torch.strided, Color.RED),
         "Tuple[Literal[torch.float32], Literal[torch.strided], "
         "Literal[tests.types.strategies.Color.RED]]"),
        (deque([META]), "collections.deque(0: f64[n])"),
        (Batch, f"{__name__}.Batch(.x: f64[n], .scale: float, .tail: {__name__}.Batch | None)"),
        (Annotated[torch.nn.Parameter, META], "Annotated[torch.nn.Parameter, f64[n]]"),
        (torch.futures.Future[int], "Future[int]"),
        (parse("RRef[List[f32[n]]]"), "RRef[List[f32[n]]]"),
        (parse("namedtuple(a: f32[n], b: int)"), "namedtuple(a: f32[n], b: int)"),
        (Encoder, "tests.types.strategies.Encoder"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (math.nan, "Literal[nan]"),
    ],
)  # fmt: skip
def test_str_reads_back(written: object, text: str) -> None:
    descriptor = as_descriptor(written)
    assert str(descriptor) == text
    assert parse_descriptor(text) == descriptor


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("List[int", r"'List\[int' is not a valid descriptor: expected '\]' or ','"),
        ("List[int, str]", r"List\[\.\.\.\] of 2 descriptor\(s\) is not a descriptor"),
        ("Literal[", "expected a value, got ''"),
        ("Literal[1.2.3]", r"expected a value, got '1\.2\.3'"),
        ("{'a' int}", "expected ':' after the key, got 'int}'"),
        ("Tuple[int, ..., str]", r"expected '\]' after \.\.\."),
        (
            f"{__name__}.State(weight: int)",
            r"State: expected its fields \['weight', 'step'\], got",
        ),
        ("nowhere.Class", "neither a word of the grammar nor a class"),
        (str(Value(torch.ones(2))), "is not a valid descriptor"),
    ],
)
def test_values_that_are_not_descriptors(text: str, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        parse_descriptor(text)


@given(types())
def test_every_type_is_a_descriptor_whose_text_reads_back(type_: TSType) -> None:
    descriptor = as_descriptor(type_)
    assert parse_descriptor(str(descriptor)) == descriptor


def test_a_record_of_plain_values_is_a_value() -> None:
    record = Batch(3, 2.0)
    assert as_descriptor(record) == Value(record)


def test_a_class_that_has_itself_for_an_attribute_is_described_once() -> None:
    fields = TSFields(Batch, ("x", "scale", "tail"), (
        DESCRIBED, FLOAT, TSUnion((TSFields(Batch, (), ()), NONE))))  # fmt: skip
    assert as_descriptor(Batch) == fields


def test_values_are_equal_as_values() -> None:
    assert Value(1) != Value(True)
    assert Value(torch.ones(2)) == Value(torch.ones(2))
    assert Value(torch.ones(2)) != Value(torch.zeros(2))
    assert Value(1) != 1


def test_tensor_leaves_are_named_by_path() -> None:
    written = {"a": [META, 3], "b": State(Optional[META], List[META])}  # type: ignore[valid-type]
    leaves = list(tensor_leaves(as_descriptor(written), "x"))
    assert leaves == [("x['a'][0]", META), ("x['b'].weight", META), ("x['b'].step[...]", META)]
    other = (Batch(META), parse("namedtuple(a: f64[n])"), Annotated[torch.nn.Parameter, META])
    leaves = list(tensor_leaves(as_descriptor(other), "x"))
    assert leaves == [("x[0].x", META), ("x[1].a", META), ("x[2]", META)]


@pytest.mark.parametrize(
    ("written", "path", "metas"),
    [
        (META, (), {META}),
        (META, (0,), set()),
        (Any, ("a", 0), {None}),
        (int, (), set()),
        (object, (), {None}),
        (torch.nn.Parameter, (), {None}),
        (deque, (0,), {None}),
        (3, (), set()),
        (torch.ones(1), (), {None}),
        (List[META], (5,), {META}),  # type: ignore[valid-type]
        (List[META], (), set()),  # type: ignore[valid-type]
        (Dict[str, META], ("w",), {META}),  # type: ignore[valid-type]
        (Optional[META], (), {META}),
        (META | ANY_TENSOR, (), {META, ANY_TENSOR}),
        (Union[META, List[ANY_TENSOR]], (0,), {ANY_TENSOR}),  # type: ignore[valid-type]
        (Batch(META), (Attribute("x"),), {META}),
        (Batch(META), (Attribute("scale"),), set()),
        (parse("namedtuple(a: f64[n])"), (0,), {META}),
        (Annotated[torch.nn.Parameter, META], (), {META}),
        (torch.futures.Future[int], (), set()),
        ({"a": (3, META)}, ("a", 1), {META}),
        ({"a": (3, META)}, ("b", 1), set()),
    ],
)
def test_descriptors_that_govern_a_path(
    written: object, path: tuple[Any, ...], metas: set[Any]
) -> None:
    assert as_descriptor(written).governing(path) == metas


UserId = typing.NewType("UserId", int)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (typing.Sequence[META], "List[f64[n]] | Tuple[f64[n], ...]"),  # type: ignore[valid-type]
        (typing.Sequence, "List[Any] | Tuple[Any, ...]"),
        (typing.MutableSequence[int], "List[int]"),
        (typing.Mapping[str, META], "Dict[str, f64[n]]"),  # type: ignore[valid-type]
        (typing.MutableMapping[str, int], "Dict[str, int]"),
        (UserId, "int"),
        (list[UserId], "List[int]"),
    ],
)
def test_abstract_containers_and_new_types(written: object, text: str) -> None:
    assert str(as_descriptor(written)) == text
