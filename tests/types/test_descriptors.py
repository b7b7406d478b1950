"""What users write, and the descriptors that it is read into."""

from __future__ import annotations

import typing
from collections import OrderedDict, deque, namedtuple
from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple, Union  # noqa: UP035

import pytest
import torch

from tsfunc.errors import DescriptorError
from tsfunc.types import MetaTensorType, Value, as_descriptor
from tsfunc.types.descriptors import (
    Anything,
    DictOf,
    InstanceOf,
    ListOf,
    Nested,
    OneOf,
    TupleOf,
    governing,
    tensor_leaves,
)

State = namedtuple("State", ["weight", "step"])
META = MetaTensorType(["n"], dtype=float)
ANY_TENSOR = MetaTensorType()


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
        (List, ListOf(Anything())),  # noqa: UP006
        (List[int], ListOf(InstanceOf(int))),  # noqa: UP006
        (list[int], ListOf(InstanceOf(int))),
        (List[META], ListOf(META)),  # type: ignore[valid-type]  # noqa: UP006
        (list[META], ListOf(META)),  # type: ignore[valid-type]
        (List[MetaTensorType], ListOf(ANY_TENSOR)),  # noqa: UP006
        (Dict, DictOf(Anything(), Anything())),  # noqa: UP006
        (Dict[str, META], DictOf(InstanceOf(str), META)),  # type: ignore[valid-type]  # noqa: UP006
        (dict[str, int], DictOf(InstanceOf(str), InstanceOf(int))),
        (Tuple, TupleOf(Anything())),  # noqa: UP006
        (Tuple[META, ...], TupleOf(META)),  # noqa: UP006
        (tuple[int, META], Nested(tuple, (0, 1), (InstanceOf(int), META))),  # type: ignore[valid-type]
        (Tuple[()], Nested(tuple, (), ())),  # noqa: UP006
        (Optional[META], OneOf((META, Value(None)))),  # noqa: UP045
        (META | None, OneOf((META, Value(None)))),
        (None | META, OneOf((Value(None), META))),
        (int | META, OneOf((InstanceOf(int), META))),
        (int | None, OneOf((InstanceOf(int), Value(None)))),
        (Union[int, str], OneOf((InstanceOf(int), InstanceOf(str)))),  # noqa: UP007
        (Literal["sum", 3], OneOf((Value("sum"), Value(3)))),
        (Annotated[int, "width"], InstanceOf(int)),
        ((META, 3), Nested(tuple, (0, 1), (META, Value(3)))),
        ([int], Nested(list, (0,), (InstanceOf(int),))),
        ({"w": META}, Nested(dict, ("w",), (META,))),
        (OrderedDict(w=META), Nested(dict, ("w",), (META,))),
        (State(META, int), Nested(State, (0, 1), (META, InstanceOf(int)))),
        (deque([META]), Nested(deque, (0,), (META,))),
        ([[META], {}], Nested(list, (0, 1), (Nested(list, (0,), (META,)), Nested(dict, (), ())))),
    ],
)
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
        (List["n"], r"x\[\.\.\.\]: ForwardRef\('n'\) can't be"),  # type: ignore[name-defined]  # noqa: F821, UP006
        ({"w": [typing.TypeVar("T")]}, r"x\['w'\]\[0\]: ~T can't be"),
        (State(1, Optional), r"x\.step: typing\.Optional can't be"),
        (Config, r"x: Config can't be checked at a call: TypedDict"),
        (Sized, r"x: Sized can't be checked at a call: Instance"),
        (dict[META, int], r"x: the keys of a dict are no tensors, got f64\[n\]"),  # type: ignore[valid-type]
    ],
)
def test_refuses(written: object, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        as_descriptor(written, "x")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (Optional[List[META]], "List[f64[n]] | None"),  # type: ignore[valid-type]  # noqa: UP006, UP045
        ({"a": (int, 3)}, "dict(['a']: tuple([0]: int, [1]: 3 (int)))"),
        (State(META, Any), "State(.weight: f64[n], .step: Any)"),
        (Dict[str, Tuple[int, ...]], "Dict[str, Tuple[int, ...]]"),  # noqa: UP006
    ],
)
def test_str(written: object, text: str) -> None:
    assert str(as_descriptor(written)) == text


def test_values_are_equal_as_values() -> None:
    assert Value(1) != Value(True)
    assert Value(torch.ones(2)) == Value(torch.ones(2))
    assert Value(torch.ones(2)) != Value(torch.zeros(2))
    assert Value(1) != 1


def test_tensor_leaves_are_named_by_path() -> None:
    written = {"a": [META, 3], "b": State(Optional[META], List[META])}  # type: ignore[valid-type]  # noqa: UP006, UP045
    leaves = list(tensor_leaves(as_descriptor(written), "x"))
    assert leaves == [("x['a'][0]", META), ("x['b'].weight", META), ("x['b'].step[...]", META)]


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
        (List[META], (5,), {META}),  # type: ignore[valid-type]  # noqa: UP006
        (List[META], (), set()),  # type: ignore[valid-type]  # noqa: UP006
        (Dict[str, META], ("w",), {META}),  # type: ignore[valid-type]  # noqa: UP006
        (Optional[META], (), {META}),  # noqa: UP045
        (META | ANY_TENSOR, (), {META, ANY_TENSOR}),
        (Union[META, List[ANY_TENSOR]], (0,), {ANY_TENSOR}),  # type: ignore[valid-type]  # noqa: UP006, UP007
        ({"a": (3, META)}, ("a", 1), {META}),
        ({"a": (3, META)}, ("b", 1), set()),
    ],
)
def test_governing(written: object, path: tuple[Any, ...], metas: set[Any]) -> None:
    assert governing(as_descriptor(written), path) == metas
