"""check: no result for a value that fits, and each mismatch with its path for others."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any, NamedTuple, Optional, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.types.strategies import (
    Base,
    Color,
    Deep,
    Encoder,
    Left,
    Level,
    below,
    call_types,
    types,
    values,
)
from tsfunc.errors import AnnotationError
from tsfunc.types import (
    MetaTensorType,
    TSCustomClass,
    TSType,
    as_descriptor,
    check,
    compile_descriptors,
    is_subtype,
    of_value,
    parse,
)
from tsfunc.types.checker import mismatches, predicate
from tsfunc.types.lattice import is_below, join_pairs

SCOPE = {"Base": Base, "Left": Left, "Color": Color, "Level": Level, "Encoder": Encoder}


class Pair(NamedTuple):
    x: Tensor
    n: int


class Other(NamedTuple):
    x: Tensor
    m: int


@dataclasses.dataclass
class Batch:
    x: MetaTensorType(["n", 8])  # type: ignore[valid-type]
    tail: Optional[Batch] = None  # noqa: UP045


class Text(str): ...


def lines(value: object, type_: Any, name: str = "x") -> list[str]:
    return [str(mismatch) for mismatch in check(value, type_, name)]


# A computed size has a value if its names have values.
TYPES = types(computed=False)


class TestLaws:
    @given(st.data())
    @settings(max_examples=50)
    def test_a_value_of_a_type_fits_it(self, data: st.DataObject) -> None:
        type_ = data.draw(TYPES)
        value = data.draw(values(type_))
        assert check(value, type_) == []

    @given(st.data())
    @settings(max_examples=50)
    def test_a_value_of_a_type_fits_each_wider_one(self, data: st.DataObject) -> None:
        wider = data.draw(TYPES)
        narrower = data.draw(below(wider) if data.draw(st.booleans()) else TYPES)
        value = data.draw(values(narrower))
        if is_subtype(narrower, wider):
            assert check(value, wider) == []

    @given(st.data())
    @settings(max_examples=100)
    def test_a_value_of_a_call_fits_its_type(self, data: st.DataObject) -> None:
        """Names are left out: the first alternative of a union that fits binds them."""
        type_ = data.draw(call_types(names=False))
        value = data.draw(values(type_))
        assert check(value, type_) == []
        contract = compile_descriptors({"x": type_}, inspect.signature(lambda x: None))
        contract.check({"x": value})
        wider = data.draw(call_types(names=False))
        if is_below([type_], [wider]):
            assert check(value, wider) == []

    @given(call_types(names=False), call_types(names=False))
    @settings(max_examples=100)
    def test_joins_of_calls_are_above_both(self, a: TSType, b: TSType) -> None:
        (joined,) = join_pairs([(as_descriptor(a), as_descriptor(b))])
        assert is_below([as_descriptor(a)], [joined]) and is_below([as_descriptor(b)], [joined])

    @given(st.data(), st.booleans())
    @settings(max_examples=50)
    def test_a_value_fits_the_type_that_it_has(self, data: st.DataObject, describe: bool) -> None:
        value = data.draw(values(data.draw(TYPES)))
        assert check(value, of_value(value, describe=describe)) == []

    @given(st.data())
    @settings(max_examples=50)
    def test_values_of_a_narrower_type_fit(self, data: st.DataObject) -> None:
        value, type_ = data.draw(values(data.draw(TYPES))), data.draw(TYPES)
        if is_subtype(of_value(value, describe=True), type_):
            assert check(value, type_) == []

    @given(st.data())
    @settings(max_examples=50)
    def test_generated_code_never_lets_a_mismatch_pass(self, data: st.DataObject) -> None:
        one, other = data.draw(TYPES), data.draw(TYPES)
        value = data.draw(values(one))
        found = mismatches([("x", value, other)])
        assert not (predicate(other)(value) and found)
        assert check(value, other) == found


class TestEveryMismatch:
    def test_the_example_of_the_design(self) -> None:
        x = {"w": [torch.ones(3, 64)] * 3 + [torch.ones(10)]}
        assert lines(x, "Dict[str, List[f32[n, 64]]]") == [
            "x['w'][3].shape: expected [n, 64], got [10]"
        ]

    def test_all_are_found(self) -> None:
        wrong = Pair(torch.ones(2), 2.0)  # type: ignore[arg-type]
        value = {"a": (1, [2, "b", None]), 3: (wrong, [])}
        assert lines(value, "Dict[str, Tuple[namedtuple(x: f32[3], n: int), List[int]]]") == [
            "x['a'][0]: expected a named tuple of x, n, got 1 (int)",
            "x['a'][1][1]: expected int, got 'b' (str)",
            "x['a'][1][2]: expected int, got None",
            "a key of x: expected str, got 3 (int)",
            "x[3][0].x.shape[0]: expected 3, got 2",
            "x[3][0].n: expected int, got 2.0 (float)",
        ]

    def test_names_are_as_python_would_write_them(self) -> None:
        assert check({"a b": 1}, "Dict[str, str]", "params")[0].path == "params['a b']"
        mismatch = check([1], list[str])[0]
        assert (mismatch.path, mismatch.expected, mismatch.got) == ("x[0]", "str", "1 (int)")

    def test_values_that_are_not_types(self) -> None:
        with pytest.raises(AnnotationError, match="3 is not a type of the language"):
            check(3, 3)


@pytest.mark.parametrize(
    ("value", "type_", "fits"),
    [
        (1, "int", True), (True, "int", False), (1.0, "int", False), (Level.LOW, "int", False),
        (torch.tensor(1), "int", False), (True, "bool", True), (1, "bool", False),
        (1.0, "float", True), (1, "float", False), (1.0, "double", True),
        ("a", "str", True), (Text("text"), "str", True), (Color.RED, "str", False),
        (None, "None", True), (0, "None", False), (None, "Optional[int]", True),
        (1, "Optional[int]", True), ("a", "Optional[int]", False), (object(), "Any", True),
        ((1, "a"), "Tuple[int, str]", True), ([1, "a"], "Tuple[int, str]", False),
        ((1,), "Tuple[int, str]", False), ((), "Tuple[()]", True), ((1,), "Tuple[()]", False),
        (Pair(torch.ones(1), 1), "Tuple[Tensor, int]", True),
        (Pair(torch.ones(1), 1), "namedtuple(x: Tensor, n: int)", True),
        (Other(torch.ones(1), 1), "namedtuple(x: Tensor, n: int)", False),
        ((torch.ones(1), 1), "namedtuple(x: Tensor, n: int)", False),
        (torch.ones(2, 2).max(0), "namedtuple(values: Tensor, indices: i64[2])", True),
        ([1, 2], "List[int]", True), ([], "List[int]", True), ((1,), "List[int]", False),
        ([1, None], "List[int]", False), ([object()], "List[Any]", True),
        ({"a": 1}, "Dict[str, int]", True), ({1: 1}, "Dict[str, int]", False),
        ({"a": 1.0}, "Dict[str, int]", False), ([], "Dict[str, int]", False),
        ({1: "a", "b": 2}, "Dict[Any, Any]", True),
        (torch.ones(2), "Tensor", True), (2, "Tensor", False), ([torch.ones(1)], "Tensor", False),
        (torch.nn.Parameter(torch.ones(1)), "Tensor", True),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.Parameter", True),
        (torch.ones(1), "torch.nn.Parameter", False),
        (torch.ones(2, 3), "f32[2, 3]", True), (torch.ones(2, 3), "f32[2, 4]", False),
        (torch.ones(2, 3), "f64[2, 3]", False), (torch.ones(2, 3), "f32[?, ?]", True),
        (torch.ones(2, 3), "f32[?]", False), (torch.ones(2, 3), "tensor[...] cpu", True),
        (torch.ones(2), "tensor[2] meta", False), (torch.ones(2), "tensor[2] no_grad", True),
        (torch.ones(2), "tensor[2] requires_grad", False),
        (torch.ones(2).to_sparse(), "tensor[2] sparse_coo", True),
        (torch.ones(2), "tensor[2] sparse_coo", False),
        (torch.ones(3, 3), "f32[n, n]", True), (torch.ones(3, 4), "f32[n, n]", False),
        (torch.ones(2), "f32[n>=3]", False), (torch.ones(4), "f32[n<=3]", False),
        (torch.ones(3, 7), "f32[n, 2*n+1]", True), (torch.ones(3, 8), "f32[n, 2*n+1]", False),
        (torch.ones(7, 3), "f32[2*n+1, n]", True), (torch.ones(6, 0), "f32[6//n, n]", False),
        ((torch.ones(3), torch.ones(3)), "Tuple[f32[n], f32[n]]", True),
        ((torch.ones(3), torch.ones(4)), "Tuple[f32[n], f32[n]]", False),
        (torch.device("cpu"), "torch.device", True), (torch.float32, "torch.dtype", True),
        ("cpu", "torch.device", False), (torch.nn.ModuleList(), "torch.nn.ModuleList", True),
        (torch.nn.ModuleDict(), "torch.nn.ModuleDict", True),
        (Color.RED, "Color", True), ("red", "Color", False), (Level.LOW, "Color", False),
        (Base(), "Base", True), (Left(), "Base", True), (Base(), "Left", False),
        (Deep(), "Encoder", True), (Base(), "Encoder", False),
    ],
)  # fmt: skip
def test_values_and_types(value: object, type_: str, fits: bool) -> None:
    assert (check(value, parse(type_, SCOPE)) == []) == fits


class TestTensors:
    def test_an_error_shows_the_argument_in_the_form_of_the_descriptor(self) -> None:
        x = torch.ones(2, 3)
        dtype = "x.dtype: expected torch.float64, got torch.float32"
        assert lines(x, "f64[2, 3]") == lines(x, "Optional[f64[...]]") == [dtype]
        assert lines(3, "Optional[f64[...]]") == ["x: expected Optional[f64[...]], got 3 (int)"]
        assert lines(x, "tensor[...] meta requires_grad sparse_coo") == [
            "x.device: expected meta, got cpu",
            "x.requires_grad: expected True, got False",
            "x.layout: expected torch.sparse_coo, got torch.strided",
        ]
        assert lines(x, torch.nn.Parameter) == ["x: expected Parameter, got f32[2, 3] cpu"]

    def test_where_a_name_got_its_size(self) -> None:
        three, four = torch.ones(3), torch.ones(4)
        assert lines([three, four], "List[f32[n]]") == [
            "x[1].shape[0]: expected 3 (n is 3 at x[0].shape[0]), got 4"
        ]
        assert lines((four, three), "Tuple[f32[2*n], f32[n]]") == [
            "x[0].shape[0]: expected 2 * n = 6 (n is 3 at x[1].shape[0]), got 4"
        ]
        assert lines(four, "f32[2*n]") == []
        assert lines(three, "f32[2*n]") == ["x.shape[0]: expected 2 * n, got 3: no size n gives it"]


class TestClasses:
    def test_the_fields_of_a_dataclass(self) -> None:
        assert check(Batch(torch.ones(2, 8)), Batch) == []
        assert check(Batch(torch.ones(2, 8), Batch(torch.ones(2, 8))), Batch) == []
        assert lines(Batch(torch.ones(2, 8), Batch(torch.ones(3, 8))), Batch) == [
            "x.tail.x.shape[0]: expected 2 (n is 2 at x.x.shape[0]), got 3"
        ]
        assert lines([Batch(1)], list[Batch]) == [
            "x[0].x: expected a tensor, tensor[n, 8], got 1 (int)"
        ]
        round_ = Batch(torch.ones(2, 8))
        round_.tail = round_
        assert check(round_, Batch) == []

    def test_names_hold_inside_and_outside_of_a_dataclass(self) -> None:
        value, type_ = (Batch(torch.ones(2, 8)), torch.ones(3)), tuple[Batch, MetaTensorType(["n"])]  # type: ignore[misc]
        assert lines(value, type_) == [
            "x[1].shape[0]: expected 2 (n is 2 at x[0].x.shape[0]), got 3"
        ]

    def test_the_attributes_of_a_module(self) -> None:
        one, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3, bias=False)
        other.scale = 2.0  # type: ignore[assignment]
        assert check(one, of_value(one)) == check(other, of_value(other)) == []
        assert lines(other, of_value(one)) == [
            "x.bias: expected Tensor, got None",
            "x.scale: expected no such attribute, got float",
        ]
        assert lines(one, of_value(other))[0] == "x.scale: expected float, got no such attribute"
        assert lines(3, of_value(one))[0].startswith("x: expected torch.nn.modules.linear.Linear(")

    def test_classes_that_refuse_isinstance(self) -> None:
        class Refuses(type):
            def __instancecheck__(cls, instance: object) -> bool:
                raise TypeError

        class Shy(metaclass=Refuses): ...

        assert check(Shy(), TSCustomClass(Shy)) == []
        assert len(check(3, TSCustomClass(Shy))) == 1

    def test_a_value_of_an_enum_that_breaks_the_rules_is_an_object(self) -> None:
        class Mixed(enum.Enum):
            A = 1
            B = "b"

        assert of_value(Mixed.A) == TSCustomClass(Mixed)


class TestInterfaces:
    class Step(Protocol):
        def step(self, x: Tensor, n: int = 1, *, scale: float) -> Tensor: ...

    def test_objects_with_the_methods_fit(self) -> None:
        class Loose:
            def step(self, x, n=3, *, scale, more=None): ...  # type: ignore[no-untyped-def]

        class Wide:
            def step(self, x: Any, n: Optional[int], scale: float) -> MetaTensorType(rank=1): ...  # type: ignore[valid-type]  # noqa: UP045

        assert check(Loose(), self.Step) == check(Wide(), self.Step) == []

    @pytest.mark.parametrize(
        "method",
        [
            "step = None",
            "def other(self, x, n, *, scale): ...",
            "def step(self, x, n): ...",
            "def step(self, x, n, *, scale, more): ...",
            "def step(self, x: int, n, *, scale): ...",
            "def step(self, x, n, *, scale) -> int: ...",
        ],
    )
    def test_objects_without_the_method_do_not_fit(self, method: str) -> None:
        scope: dict[str, Any] = {"__name__": __name__}
        exec(f"class Made:\n    {method}\n", scope)
        (line,) = lines(scope["Made"](), self.Step)
        assert line.startswith("x.step: expected a method step(self, x: 'Tensor', n: 'int' = 1, *")
        assert line.endswith(" of Made" if "step(" in method else "got none in Made")

    def test_classes_that_inherit_only_the_abstract_method_do_not_fit(self) -> None:
        class Nothing(self.Step):  # type: ignore[misc, name-defined]
            ...

        assert lines(Nothing(), self.Step)[0].endswith("got none in Nothing")


class TestFutures:
    def test_the_value_of_a_future(self) -> None:
        future: Any = torch.futures.Future()
        assert check(future, "Future[int]") == []
        future.set_result("a")
        assert lines(future, "Future[int]") == ["x.value(): expected int, got 'a' (str)"]
        assert lines(3, "Future[int]") == ["x: expected Future[int], got 3 (int)"]

    def test_the_error_that_was_raised(self) -> None:
        future: Any = torch.futures.Future()
        future.set_exception(ValueError("no"))
        assert lines(future, "Future[int]") == [
            "x.value(): expected int, got ValueError('no') (ValueError)"
        ]
