"""of_value: the types of values, and the schemas of instances."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.types.strategies import Base, Color, Leaf, Level, Mine, Right, types, values
from tsfunc.errors import TypeCheckError
from tsfunc.types import TSModuleType, TSType, check, is_subtype, of_value, parse, schema_of


class Pair(NamedTuple):
    x: Tensor
    n: int


@dataclass
class Record:
    __slots__ = ("n", "x")
    n: int
    x: Tensor


ONE, TWO = torch.ones(1), torch.ones(2, 3)
SCOPE = {"Base": Base, "Leaf": Leaf, "Color": Color, "Level": Level, "Record": Record,
         "deque": collections.deque, "function": type(lambda: None)}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (1, "int"), (True, "bool"), (1.0, "float"), ("a", "str"), (None, "None"),
        (ONE, "Tensor"), (torch.nn.Parameter(ONE), "Tensor"), (ONE.as_subclass(Mine), "Tensor"),
        ((), "Tuple[()]"), ((1, ONE), "Tuple[int, Tensor]"),
        ((1, (None,)), "Tuple[int, Tuple[None]]"),
        (Pair(ONE, 1), "namedtuple(x: Tensor, n: int)"),
        (TWO.max(0), "namedtuple(values: Tensor, indices: Tensor)"),
        ([], "List[Tensor]"), ([1, 2], "List[int]"), ([1, None], "List[Optional[int]]"),
        ([None], "List[None]"), ([1, True], "List[Any]"), ([1, "a"], "List[Any]"),
        ([[1], [None], []], "List[List[Optional[int]]]"), ([[], []], "List[List[Tensor]]"),
        ([(1, None), (None, "a")], "List[Tuple[Optional[int], Optional[str]]]"),
        ([(1,), (1, 2)], "List[Any]"), ([Pair(ONE, 1), (ONE, 1)], "List[Tuple[Tensor, int]]"),
        ({}, "Dict[str, Tensor]"), ({"a": 1}, "Dict[str, int]"), ({1: ONE}, "Dict[int, Tensor]"),
        ({1: 1, "a": 2}, "Dict[Any, int]"), ({(1,): 2}, "Dict[Any, int]"),
        ([{"a": 1}, {"b": None}, {}], "List[Dict[str, Optional[int]]]"),
        (collections.OrderedDict(a=1), "Dict[str, int]"),
        (torch.device("cpu"), "torch.device"), (torch.float32, "torch.dtype"),
        (torch.strided, "torch.layout"), (TWO.shape, "torch.Size"),
        (torch.nn.ModuleList(), "torch.nn.ModuleList"),
        (torch.nn.ModuleDict(), "torch.nn.ModuleDict"),
        (Color.RED, "Color"), (Level.LOW, "Level"), (Base(), "Base"), (Leaf(), "Leaf"),
        ([Leaf(), Right()], "List[Base]"), (Record(1, ONE), "Record"),
        (collections.deque(), "deque"), (1j, "complex"), (lambda: None, "function"),
        ([torch.nn.ReLU(), None], "List[Optional[torch.nn.modules.activation.ReLU]]"),
        ([torch.nn.ReLU(), torch.nn.Tanh()], "List[torch.nn.Module]"),
    ],
)  # fmt: skip
def test_of_value(value: object, type_: str) -> None:
    assert of_value(value) == parse(type_, SCOPE)


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (TWO, "f32[2, 3] cpu no_grad strided"),
        ([ONE, torch.ones(2)], "List[f32[?] cpu no_grad strided]"),
        ([torch.ones(1, 1), torch.ones(2, 2)], "List[f32[?, ?] cpu no_grad strided]"),
        ([(ONE, ONE), (TWO, TWO)],
         "List[Tuple[f32[..., ?] cpu no_grad strided, f32[..., ?] cpu no_grad strided]]"),
        ({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)},
         "Dict[str, tensor[2] cpu no_grad strided]"),
        ((ONE, 1), "Tuple[f32[1] cpu no_grad strided, int]"),
    ],
)  # fmt: skip
def test_of_value_with_tensors_described(value: object, type_: str) -> None:
    assert str(of_value(value, describe=True)) == type_


@given(st.data())
@settings(max_examples=50)
def test_the_description_of_a_value_is_a_subtype_of_its_type(data: st.DataObject) -> None:
    value = data.draw(values(data.draw(types())))
    narrower: Any = of_value(value, describe=True)
    assert is_subtype(narrower, of_value(value))


tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 2), max_size=2) | st.integers(0, 2).map(lambda n: [n, n]),
    st.sampled_from([torch.float32, torch.float32, torch.int64]),
)
nested = st.recursive(
    tensors | st.sampled_from([None, 1, True, "a", 1.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(nested, st.booleans())
@settings(max_examples=200)
def test_the_inferred_type_accepts_the_value(value: Any, describe: bool) -> None:
    inferred = of_value(value, describe=describe)
    assert check(value, inferred) == []
    assert of_value(value, describe=describe) == inferred


class TestFutures:
    def test_their_contents(self) -> None:
        future: Any = torch.futures.Future()
        assert str(of_value(future)) == "Future[Any]"
        future.set_result([1])
        assert str(of_value(future)) == "Future[List[int]]"
        failed: Any = torch.futures.Future()
        failed.set_exception(ValueError())
        assert str(of_value(failed)) == "Future[Any]"


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without RPC")
@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")
def test_remote_references(tmp_path: Path) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        remote = rpc.RRef([1])
        assert str(of_value(remote)) == "RRef[List[int]]"
        assert check(remote, "RRef[List[int]]") == []
        (mismatch,) = check(remote, "RRef[List[str]]")
        assert str(mismatch) == "x.local_value()[0]: expected str, got 1 (int)"
        assert len(check(3, "RRef[int]")) == 1
    finally:
        rpc.shutdown()


class TestModules:
    def test_a_module_has_a_type_of_its_own(self) -> None:
        type_ = of_value(torch.nn.Linear(2, 3, bias=False))
        assert isinstance(type_, TSModuleType) and not isinstance(type_, TSType)
        assert str(type_) == (
            "torch.nn.modules.linear.Linear(training: bool, in_features: int, "
            "out_features: int, weight: Tensor, bias: None)"
        )

    def test_two_modules_of_one_class_may_differ_in_theirs(self) -> None:
        class Net(torch.nn.Module):
            def __init__(self, layer: torch.nn.Module) -> None:
                super().__init__()
                self.layer = layer

        one, other = Net(torch.nn.ReLU()), Net(torch.nn.Linear(1, 1))
        assert of_value(one) == of_value(Net(torch.nn.ReLU())) != of_value(other)
        assert of_value([one, other]) == parse("List[Net]", {"Net": Net})


def test_the_schema_of_an_instance() -> None:
    assert {k: str(t) for k, t in schema_of(Record(1, ONE)).items()} == {"n": "int", "x": "Tensor"}
    holder = Base()
    holder.own, holder.module = holder, torch.nn.ReLU()  # type: ignore[attr-defined]
    types_ = schema_of(holder)
    assert types_["own"] == parse("Base", SCOPE) and isinstance(types_["module"], TSModuleType)


def test_a_container_that_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeCheckError, match="a list that contains itself, or is nested too deep"):
        of_value(endless)


def test_a_module_that_leads_back_to_itself() -> None:
    outer, inner = torch.nn.ReLU(), torch.nn.Tanh()
    outer.inner = inner
    object.__setattr__(inner, "outer", outer)
    name = "torch.nn.modules.activation"
    assert str(of_value(outer)) == (
        f"{name}.ReLU(training: bool, inplace: bool, "
        f"inner: {name}.Tanh(training: bool, outer: {name}.ReLU))"
    )


def test_symbolic_numbers_are_numbers() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size: Any = ShapeEnv().create_unbacked_symint()
    assert [str(of_value(v)) for v in (size, size / 2, size > 3)] == ["int", "float", "bool"]


def test_all_is_a_type_of_its_own() -> None:
    type_: TSType = parse("Tuple[int]")
    assert str(of_value(type_)) == "tsfunc.types.containers.TSTuple"
