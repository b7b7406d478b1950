"""What users write, and the descriptors that it is read into."""

# Both of typing's styles are what is tested here, so neither may be turned into the other.
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
    INT,
    MetaTensorType,
    TSFuture,
    TSModuleInterface,
    TSRRef,
    TSTensor,
    TSType,
    Value,
    as_descriptor,
    parse,
    parse_descriptor,
)
from tsfunc.types.descriptors import (
    Anything,
    Attribute,
    DictOf,
    FieldsOf,
    InstanceOf,
    ListOf,
    NamedOf,
    Nested,
    OfType,
    OneOf,
    TensorOf,
    TupleOf,
    governing,
    tensor_leaves,
)

State = namedtuple("State", ["weight", "step"])
META = MetaTensorType(["n"], dtype=float)
ANY_TENSOR = MetaTensorType()


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
        (META, META),
        (torch.Tensor, ANY_TENSOR),
        (MetaTensorType, ANY_TENSOR),
        (int, InstanceOf(int)),
        (torch.nn.Module, InstanceOf(torch.nn.Module)),
        (type(None), Value(None)),
        (None, Value(None)),
        (Any, Anything()),
        ("sum", Value("sum")),
        (torch.float32, Value(torch.float32)),
        (List, ListOf(Anything())),
        (List[int], ListOf(InstanceOf(int))),
        (list[int], ListOf(InstanceOf(int))),
        (List[META], ListOf(META)),  # type: ignore[valid-type]
        (list[META], ListOf(META)),  # type: ignore[valid-type]
        (List[MetaTensorType], ListOf(ANY_TENSOR)),
        (Dict, DictOf(Anything(), Anything())),
        (Dict[str, META], DictOf(InstanceOf(str), META)),  # type: ignore[valid-type]
        (dict[str, int], DictOf(InstanceOf(str), InstanceOf(int))),
        (Tuple, TupleOf(Anything())),
        (Tuple[META, ...], TupleOf(META)),
        (tuple[int, META], Nested(tuple, (0, 1), (InstanceOf(int), META))),  # type: ignore[valid-type]
        (Tuple[()], Nested(tuple, (), ())),
        (Optional[META], OneOf((META, Value(None)))),
        (META | None, OneOf((META, Value(None)))),
        (None | META, OneOf((Value(None), META))),
        (int | META, OneOf((InstanceOf(int), META))),
        (int | None, OneOf((InstanceOf(int), Value(None)))),
        (Union[int, str], OneOf((InstanceOf(int), InstanceOf(str)))),
        (Literal["sum", 3], OneOf((Value("sum"), Value(3)))),
        (Annotated[int, "width"], InstanceOf(int)),
        (Annotated[torch.Tensor, META], META),
        (Annotated[torch.nn.Parameter, META], TensorOf(torch.nn.Parameter, META)),
        (torch.nn.Parameter, InstanceOf(torch.nn.Parameter)),
        (Fields, Nested(Fields, (0, 1, 2), (META, ListOf(META), Anything()))),
        (State, Nested(State, (0, 1), (Anything(), Anything()))),
        (Encoder, OfType(TSModuleInterface(Encoder))),
        (torch.futures.Future[META], OfType(TSFuture(TSTensor(meta=META)))),  # type: ignore[valid-type]
        # types of the language
        (parse("Any"), Anything()),
        (parse("None"), Value(None)),
        (parse("double"), InstanceOf(float)),
        (parse("f64[n]"), META),
        (parse("List[f64[n]]"), ListOf(META)),
        (parse("Dict[str, f64[n]]"), DictOf(InstanceOf(str), META)),
        (parse("Optional[f64[n]]"), OneOf((META, Value(None)))),
        (parse("Tuple[f64[n], int]"), Nested(tuple, (0, 1), (META, InstanceOf(int)))),
        (parse("namedtuple(a: f64[n])"), NamedOf(("a",), (META,))),
        (parse("RRef[int]"), OfType(TSRRef(INT))),
        (parse("torch.nn.Parameter"), InstanceOf(torch.nn.Parameter)),
        (parse("torch.device"), InstanceOf(torch.device)),
        (parse("tests.types.strategies.Color"), InstanceOf(Color)),
        # instances of dataclasses
        (Batch(META, 2.0), FieldsOf(Batch, ("x", "scale", "tail"),
                                    (META, Value(2.0), Value(None)))),
        (Batch(None, float), FieldsOf(Batch, ("x", "scale", "tail"),  # type: ignore[arg-type]
                                      (Value(None), InstanceOf(float), Value(None)))),
        ((META, 3), Nested(tuple, (0, 1), (META, Value(3)))),
        ([int], Nested(list, (0,), (InstanceOf(int),))),
        ({"w": META}, Nested(dict, ("w",), (META,))),
        (OrderedDict(w=META), Nested(dict, ("w",), (META,))),
        (State(META, int), Nested(State, (0, 1), (META, InstanceOf(int)))),
        (deque([META]), Nested(deque, (0,), (META,))),
        ([[META], {}], Nested(list, (0, 1), (Nested(list, (0,), (META,)), Nested(dict, (), ())))),
    ],
)  # fmt: skip
def test_reads(written: object, descriptor: object) -> None:
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
        (dict[META, int], r"x: the keys of a dict are no tensors, got f64\[n\]"),  # type: ignore[valid-type]
    ],
)
def test_refuses(written: object, message: str) -> None:
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
        ("List[int", r"'List\[int' is no descriptor: expected '\]' or ','"),
        ("List[int, str]", r"List of 2 descriptor\(s\) is none"),
        ("Literal[", "expected a value, got ''"),
        ("Literal[1.2.3]", r"'1\.2\.3' is no value"),
        ("{'a' int}", "expected ':' after the key, got 'int}'"),
        ("Tuple[int, ..., str]", r"expected '\]' after \.\.\."),
        (
            f"{__name__}.State(weight: int)",
            r"State has the fields \['weight', 'step'\], got",
        ),
        ("nowhere.Class", "neither a word of the grammar nor a class"),
        (str(Value(torch.ones(2))), "is no descriptor"),
    ],
)
def test_what_is_no_descriptor(text: str, message: str) -> None:
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
    fields = FieldsOf(Batch, ("x", "scale", "tail"), (
        META, InstanceOf(float), OneOf((InstanceOf(Batch), Value(None)))))  # fmt: skip
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
def test_governing(written: object, path: tuple[Any, ...], metas: set[Any]) -> None:
    assert governing(as_descriptor(written), path) == metas


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
