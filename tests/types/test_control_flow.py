"""Control-flow joins: the branches of a condition, and the carry of a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.types.strategies import types
from tsfunc.errors import TypeCheckError
from tsfunc.types import (
    ANY,
    TSCustomClass,
    TSType,
    check_carry,
    differences,
    is_subtype,
    join,
    join_branches,
    of_value,
    parse,
)


class TestBranches:
    @pytest.mark.parametrize(
        ("one", "other", "joined"),
        [
            ("Tensor", "Tensor", "Tensor"),
            ("f32[3]", "f32[4]", "f32[?]"),
            ("int", "None", "Optional[int]"),
            ("Any", "int", "Any"),
            ("List[f32[3]]", "List[f32[4]]", "List[f32[?]]"),
            ("Tuple[int, Any]", "Tuple[None, int]", "Tuple[Optional[int], Any]"),
        ],
    )
    def test_their_common_type(self, one: str, other: str, joined: str) -> None:
        assert join_branches({"yes": parse(one), "no": parse(other)}) == parse(joined)

    @pytest.mark.parametrize(
        ("types_", "places"),
        [
            (["int", "str"], ["There nothing is both int and str but Any"]),
            (["bool", "int"], ["There nothing is both bool and int"]),
            (["int", "None", "str"], ["There nothing is both Optional[int] and str"]),
            (["Tuple[int, int]", "Tuple[int, str]"], ["At [1] nothing is both int and str"]),
            (["Tuple[int]", "Tuple[int, int]"], ["There nothing is both Tuple[int] and Tuple[int"]),
            (["List[int]", "List[None]"], ["There nothing is both List[int] and List[None]"]),
            (
                ["namedtuple(a: Tuple[int], b: str)", "namedtuple(a: Tuple[str], b: Tensor)"],
                ["At .a[0] nothing is both int and str", "At .b nothing is both str and Tensor"],
            ),
        ],
    )
    def test_types_without_a_common_type(self, types_: list[str], places: list[str]) -> None:
        branches: dict[str, TSType] = {f"branch {i}": parse(t) for i, t in enumerate(types_)}
        with pytest.raises(TypeCheckError) as caught:
            join_branches(branches, where="switch")
        text = str(caught.value)
        assert text.startswith("switch: its branches return values of different types:\n")
        for line in [*(f"  {name}: {type_}\n" for name, type_ in branches.items()), *places]:
            assert line in text
        assert text.endswith("Return the same type from each branch.")

    @pytest.mark.parametrize(
        ("one", "other", "message"),
        [
            ("f32[3]", "f32[4]", r"There one is f32\[3\], the other f32\[4\]"),
            ("Tuple[int, None]", "Tuple[int, int]", r"At \[1\] one is None, the other int"),
            ("List[f32[3]]", "List[f64[3]]", r"At \[\.\.\.\] one is f32\[3\], the other f64\[3\]"),
        ],
    )
    def test_exactly_the_same(self, one: str, other: str, message: str) -> None:
        branches: dict[str, TSType] = {"true": parse(one), "false": parse(other)}
        join_branches(branches)
        with pytest.raises(TypeCheckError, match=message):
            join_branches(branches, exact=True)

    def test_modules_are_joined_by_their_classes(self) -> None:
        branches = {"a": of_value(torch.nn.Linear(1, 2)), "b": of_value(torch.nn.Linear(1, 3))}
        assert join_branches(branches) == TSCustomClass(torch.nn.Linear)

    @given(types(), types())
    def test_an_error_is_where_any_would_come_in(self, one: TSType, other: TSType) -> None:
        try:
            joined = join_branches({"one": one, "other": other})
        except TypeCheckError:
            assert "Any" in str(join(one, other))
        else:
            assert joined == join(one, other)
            if joined == ANY:
                assert ANY in (one, other)


class TestCarry:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("Tensor", "f32[3]"),
            ("f32[3]", "f32[3]"),
            ("f32[n]", "f32[n]"),
            ("f32[?]", "f32[3]"),
            ("Optional[int]", "int"),
            ("Tuple[int, Tensor]", "namedtuple(a: int, b: Tensor)"),
        ],
    )
    def test_values_that_may_be_returned(self, before: str, after: str) -> None:
        assert check_carry(parse(before), parse(after)) == parse(before)

    @pytest.mark.parametrize(
        ("before", "after", "place"),
        [
            ("int", "float", "\nint has become float. "),
            ("f32[3]", "Tensor", "\nf32[3] has become Tensor. "),
            ("f32[3]", "f64[3]", "\nf32[3] has become f64[3]. "),
            ("f32[n]", "f32[3]", "\nf32[n] has become f32[3]. "),
            ("f32[n]", "f32[m]", "\nf32[n] has become f32[m]. "),
            ("int", "Optional[int]", "\nint has become Optional[int]. "),
            ("Tuple[int, f32[3]]", "Tuple[int, f32[4]]", "\nAt [1] f32[3] has become f32[4]. "),
            ("List[int]", "List[Any]", "\nList[int] has become List[Any]. "),
            ("Dict[str, f32[3]]", "Dict[str, f32[4]]", "\nAt [...] f32[3] has become f32[4]. "),
        ],
    )
    def test_values_that_may_not_be_returned(self, before: str, after: str, place: str) -> None:
        with pytest.raises(TypeCheckError) as caught:
            check_carry(parse(before), parse(after), where="scan", name="carry")
        text = str(caught.value)
        assert text.startswith(
            f"scan: the type of carry changes:\n  before the first step: {before}\n"
            f"  after a step: {after}\n"
        )
        assert place in text and text.endswith(
            "values of the same type, shape and dtype from the body."
        )


@given(types(), types())
def test_differences_are_where_types_part(one: TSType, other: TSType) -> None:
    found = list(differences(one, other))
    assert (not found) == (one == other)
    assert all(left != right for _, left, right in found)
    if not is_subtype(one, other):
        assert any(not is_subtype(left, right) for _, left, right in found) or "[" in str(one)


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ("Future[Tuple[int]]", "Future[Tuple[str]]", ".value()[0]"),
        ("RRef[int]", "RRef[str]", ".local_value()"),
        ("Optional[Tuple[int]]", "Optional[Tuple[str]]", "[0]"),
        ("namedtuple(a: int)", "namedtuple(b: int)", ""),
        ("Dict[str, int]", "Dict[int, int]", ""),
    ],
)
def test_paths_of_differences(one: str, other: str, path: str) -> None:
    assert [place for place, _, _ in differences(parse(one), parse(other))] == [path]
