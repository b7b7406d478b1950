"""is_subtype and join: the laws of a lattice, and a table of examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.types.strategies import (
    Base,
    Color,
    Deep,
    Encoder,
    Leaf,
    Left,
    Level,
    Right,
    below,
    types,
)
from tsfunc.types import (
    ANY,
    INT,
    NONE,
    TSCustomClass,
    TSEnum,
    TSModuleInterface,
    TSModuleType,
    TSTuple,
    TSType,
    is_subtype,
    join,
    optional,
    parse,
)

SCOPE = {cls.__name__: cls for cls in (Base, Left, Right, Leaf, Color, Level, Encoder, Deep)} | {
    "Parameter": torch.nn.Parameter,
    "Module": torch.nn.Module,
    "Linear": torch.nn.Linear,
}


def equal(left: TSType, right: TSType) -> bool:
    """True if they are equal but for the names of sizes."""
    return is_subtype(left, right) and is_subtype(right, left)


class TestOrder:
    @given(types(), types(), types())
    @settings(max_examples=200)
    def test_is_an_order(self, a: TSType, b: TSType, c: TSType) -> None:
        assert is_subtype(a, a)
        if is_subtype(a, b) and is_subtype(b, c):
            assert is_subtype(a, c)

    @given(types(names=False), types(names=False))
    def test_types_that_are_below_each_other_are_equal(self, a: TSType, b: TSType) -> None:
        assert equal(a, b) == (a == b)

    @given(types())
    def test_any_is_the_top_and_none_below_each_optional(self, a: TSType) -> None:
        assert is_subtype(a, ANY)
        assert is_subtype(ANY, a) == (a == ANY)
        assert is_subtype(NONE, optional(a)) and is_subtype(a, optional(a))


class TestJoin:
    @given(types(), types())
    @settings(max_examples=200)
    def test_is_above_both_and_does_not_mind_their_order(self, a: TSType, b: TSType) -> None:
        joined = join(a, b)
        assert is_subtype(a, joined) and is_subtype(b, joined)
        assert joined == join(b, a)

    @given(types(), types())
    @settings(max_examples=200)
    def test_is_above_both_where_one_side_has_none(self, a: TSType, b: TSType) -> None:
        """If only one side has a place, its names agree with those of the other places."""
        one, other = TSTuple((a, a)), TSTuple((b, NONE))
        joined = join(one, other)
        assert is_subtype(one, joined) and is_subtype(other, joined)
        assert joined == join(other, one)

    @given(types())
    def test_of_a_type_with_itself_or_with_any(self, a: TSType) -> None:
        assert join(a, a) == a
        assert join(a, ANY) == ANY
        assert equal(join(a, NONE), optional(a))

    @given(types(), types())
    def test_is_the_wider_one_of_two_that_are_related(self, a: TSType, b: TSType) -> None:
        above = join(a, b)
        assert join(a, above) == above or equal(join(a, above), above)
        assert is_subtype(a, b) == equal(join(a, b), b)

    @given(*[types(names=False)] * 3)
    def test_is_associative(self, a: TSType, b: TSType, c: TSType) -> None:
        assert join(join(a, b), c) == join(a, join(b, c))

    @given(types(names=False), st.data())
    def test_is_the_least_type_above_both(self, c: TSType, data: st.DataObject) -> None:
        a, b = data.draw(below(c)), data.draw(below(c))
        assert is_subtype(a, c) and is_subtype(b, c)
        assert is_subtype(join(a, b), c)

    def test_where_classes_have_no_least_common_base(self) -> None:
        class One: ...

        class Other: ...

        class Both(One, Other): ...

        class Again(One, Other): ...

        both, again = TSCustomClass(Both), TSCustomClass(Again)
        assert join(both, again) == ANY
        assert join(both, TSCustomClass(Other)) == TSCustomClass(Other)


@pytest.mark.parametrize(
    ("narrower", "wider", "related"),
    [
        ("int", "Any", True),
        ("Any", "int", False),
        ("int", "int", True),
        ("bool", "int", False),
        ("int", "float", False),
        ("float", "double", True),
        ("double", "float", False),
        ("None", "Optional[int]", True),
        ("int", "Optional[int]", True),
        ("Optional[int]", "int", False),
        ("Optional[f32[3]]", "Optional[Tensor]", True),
        ("Tuple[int, None]", "Tuple[Any, Optional[int]]", True),
        ("Tuple[int, int]", "Tuple[int]", False),
        ("namedtuple(a: int, b: int)", "Tuple[int, Any]", True),
        ("Tuple[int]", "namedtuple(a: int)", False),
        ("namedtuple(a: int)", "namedtuple(b: int)", False),
        ("namedtuple(a: int)", "namedtuple(a: Optional[int])", True),
        ("List[int]", "List[int]", True),
        ("List[int]", "List[Any]", False),
        ("List[int]", "List[Optional[int]]", False),
        ("List[f32[3]]", "List[Tensor]", True),
        ("List[Tuple[int]]", "List[Tuple[Any]]", False),
        ("Dict[str, int]", "Dict[str, Any]", False),
        ("Dict[str, f32[3]]", "Dict[str, f32[n]]", True),
        ("Future[int]", "Future[Any]", True),
        ("RRef[int]", "RRef[Optional[int]]", True),
        ("Future[int]", "RRef[int]", False),
        ("f32[3, 64] cpu", "Tensor", True),
        ("Tensor", "f32[...]", False),
        ("f32[3, 64]", "f32[?, ?]", True),
        ("f32[3, 64]", "f64[3, 64]", False),
        ("f32[3]", "f32[?, ?]", False),
        ("f32[...]", "f32[?]", False),
        ("f32[?]", "f32[...]", True),
        ("tensor[3] cuda:1", "tensor[3] cuda", True),
        ("tensor[3] cuda", "tensor[3] cuda:1", False),
        ("tensor[3] cpu", "tensor[3] no_grad", False),
        ("tensor[3] requires_grad", "tensor[3]", True),
        ("tensor[3] strided", "tensor[3] sparse_coo", False),
        ("f32[3, 64]", "f32[n, 64]", True),
        ("f32[n, 64]", "f32[3, 64]", False),
        ("f32[3, 3]", "f32[n, n]", True),
        ("f32[3, 4]", "f32[n, n]", False),
        ("f32[?, ?]", "f32[n, m]", True),
        ("f32[?, ?]", "f32[n, n]", False),
        ("f32[m, m]", "f32[n, n]", True),
        ("f32[2<=k<=3]", "f32[n>=2]", True),
        ("f32[k>=1]", "f32[n>=2]", False),
        ("f32[?]", "f32[n<=9]", False),
        ("f32[?]", "f32[n>=0]", True),
        ("f32[1]", "f32[n>=2]", False),
        ("f32[3<=n<=3]", "f32[3]", True),
        ("Tuple[f32[3], f32[3]]", "Tuple[f32[n], f32[n]]", True),
        ("Tuple[f32[3], f32[4]]", "Tuple[f32[n], f32[n]]", False),
        ("f32[3, 7]", "f32[n, 2*n+1]", True),
        ("f32[3, 8]", "f32[n, 2*n+1]", False),
        ("f32[m, 2*m+1]", "f32[n, 2*n+1]", True),
        ("f32[m, 2*k+1]", "f32[n, 2*n+1]", False),
        ("f32[?, ?]", "f32[n, 2*n]", False),
        ("f32[0, 3]", "f32[n, 6//n]", False),
        ("f32[4]", "f32[2*n]", True),
        ("f32[5]", "f32[2*n]", False),
        ("f32[6*m]", "f32[2*n]", True),
        ("f32[3*m]", "f32[2*n]", False),
        ("f32[m+1]", "f32[n+1]", True),
        ("f32[m]", "f32[n+1]", False),
        ("f32[m>=1]", "f32[n+1]", True),
        ("f32[6, 2]", "f32[a*b, a]", True),
        ("f32[6, 4]", "f32[a*b, a]", False),
        ("Tuple[f32[4], f32[3]]", "Tuple[f32[2*n], f32[n+1]]", True),
        ("Tuple[f32[4], f32[4]]", "Tuple[f32[2*n], f32[n+1]]", False),
        ("Parameter", "Tensor", True),
        ("Tensor", "Parameter", False),
        ("List[Parameter]", "List[Tensor]", False),
        ("torch.device", "torch.dtype", False),
        ("Leaf", "Base", True),
        ("Base", "Leaf", False),
        ("Left", "Right", False),
        ("Color", "Color", True),
        ("Color", "Level", False),
        ("Color", "str", False),
        ("Level", "int", False),
        ("Deep", "Encoder", True),
        ("Encoder", "Deep", False),
        ("Linear", "Module", True),
    ],
)
def test_subtypes(narrower: str, wider: str, related: bool) -> None:
    assert is_subtype(parse(narrower, SCOPE), parse(wider, SCOPE)) == related


@pytest.mark.parametrize(
    ("left", "right", "joined"),
    [
        ("int", "int", "int"),
        ("int", "None", "Optional[int]"),
        ("int", "Optional[int]", "Optional[int]"),
        ("Optional[int]", "None", "Optional[int]"),
        ("int", "float", "Any"),
        ("float", "double", "double"),
        ("int", "str", "Any"),
        ("bool", "int", "Any"),
        ("Optional[int]", "str", "Any"),
        ("Tuple[int, None]", "Tuple[None, str]", "Tuple[Optional[int], Optional[str]]"),
        ("Tuple[int]", "Tuple[int, int]", "Any"),
        ("Tuple[int]", "Tuple[str]", "Tuple[Any]"),
        ("Tuple[int]", "None", "Optional[Tuple[int]]"),
        ("namedtuple(a: int)", "namedtuple(a: None)", "namedtuple(a: Optional[int])"),
        ("namedtuple(a: int)", "namedtuple(b: int)", "Tuple[int]"),
        ("namedtuple(a: int)", "Tuple[None]", "Tuple[Optional[int]]"),
        ("List[int]", "List[int]", "List[int]"),
        ("List[int]", "List[str]", "Any"),
        ("List[int]", "List[None]", "Any"),
        ("List[f32[3]]", "List[f32[4]]", "List[f32[?]]"),
        ("Dict[str, f32[3]]", "Dict[str, f64[3]]", "Dict[str, tensor[3]]"),
        ("Dict[str, int]", "Dict[int, int]", "Any"),
        ("Future[int]", "Future[None]", "Future[Optional[int]]"),
        ("RRef[int]", "Future[int]", "Any"),
        ("f32[3, 64]", "f32[4, 64]", "f32[?, 64]"),
        ("f32[3, 64]", "f32[64]", "f32[..., 64]"),
        ("f32[1, 2]", "f32[3]", "f32[..., ?]"),
        ("f32[3]", "f32[]", "f32[...]"),
        ("f32[3, 64]", "f32[..., 5, 64]", "f32[..., ?, 64]"),
        ("f32[..., 3, 64]", "f32[64]", "f32[..., 64]"),
        ("f32[n % 4 == 0, 1]", "f32[n % 6 == 0, 2]", "f32[n % 2 == 0, ?]"),
        ("f32[n in {2, 4}, 1]", "f32[n in {8}, 2]", "f32[n in {2, 4, 8}, ?]"),
        ("f32[2, 3] strides[1, 2]", "f32[2, 3] strides[1, 4]", "f32[2, 3] strides[1, ?]"),
        ("f32[3] contiguous_format", "f32[4] contiguous_format", "f32[?] contiguous_format"),
        ("f32[3] cpu", "f64[3] cpu", "tensor[3] cpu"),
        ("tensor[3] cuda:0", "tensor[3] cuda:1", "tensor[3] cuda"),
        ("tensor[3] cuda:0", "tensor[3] cpu", "tensor[3]"),
        ("tensor[3] requires_grad strided", "tensor[3] no_grad strided", "tensor[3] strided"),
        ("f32[3, 3]", "f32[4, 4]", "f32[n1, n1]"),
        ("f32[3, 3]", "f32[n, n]", "f32[n, n]"),
        ("f32[3, 3, 1]", "f32[n, n, 2]", "f32[n, n, ?]"),
        ("f32[n, 2*n, 1]", "f32[n, 2*n, 2]", "f32[n, 2 * n, ?]"),
        ("f32[n>=2, 1]", "f32[1<=n<=3, 2]", "f32[n>=1, ?]"),
        ("f32[n]", "f32[m]", "f32[m]"),
        ("Tuple[f32[n+1], f32[n+1]]", "Tuple[f32[n], None]", "Tuple[f32[n], Optional[f32[n]]]"),
        ("Tuple[f32[n], f32[2*n]]", "Tuple[f32[3], None]", "Tuple[f32[n], Optional[f32[2*n]]]"),
        (
            "Tuple[f32[n], f32[2*n]]",
            "Tuple[None, None]",
            "Tuple[Optional[f32[n]], Optional[f32[2*n]]]",
        ),
        ("Parameter", "Tensor", "Tensor"),
        ("Parameter", "f32[3]", "Tensor"),
        ("Tensor", "int", "Any"),
        ("Leaf", "Right", "Base"),
        ("Leaf", "Left", "Left"),
        ("Base", "Color", "Any"),
        ("Color", "Level", "Any"),
        ("Deep", "Encoder", "Encoder"),
        ("torch.device", "torch.dtype", "Any"),
    ],
)
def test_least_types_above_two(left: str, right: str, joined: str) -> None:
    assert join(parse(left, SCOPE), parse(right, SCOPE)) == parse(joined, SCOPE)
    assert join(parse(right, SCOPE), parse(left, SCOPE)) == parse(joined, SCOPE)


class TestModules:
    ONE: Any = TSModuleType(torch.nn.Linear, (("in_features", INT),))
    OTHER: Any = TSModuleType(torch.nn.Linear, ())

    def test_the_type_of_a_module_is_below_its_class_alone(self) -> None:
        linear = TSCustomClass(torch.nn.Linear)
        assert is_subtype(self.ONE, self.ONE) and not is_subtype(self.ONE, self.OTHER)
        assert is_subtype(self.ONE, linear) and is_subtype(self.ONE, optional(linear))
        assert is_subtype(self.ONE, ANY) and not is_subtype(linear, self.ONE)
        assert not is_subtype(self.ONE, TSCustomClass(torch.nn.Conv2d))

    def test_two_modules_have_their_class_in_common(self) -> None:
        assert join(self.ONE, self.ONE) == self.ONE
        assert join(self.ONE, self.OTHER) == TSCustomClass(torch.nn.Linear)
        assert join(self.ONE, NONE) == optional(TSCustomClass(torch.nn.Linear))
        other: Any = TSModuleType(torch.nn.Conv2d, ())
        assert join(self.ONE, other) == TSCustomClass(torch.nn.Module)


def test_nominal_types_of_one_name_are_distinguished() -> None:
    def make() -> type:
        class Local: ...

        return Local

    assert not is_subtype(TSCustomClass(make()), TSCustomClass(make()))
    assert is_subtype(TSModuleInterface(Encoder), ANY) and is_subtype(TSEnum(Color), ANY)
