"""The normal form of sizes against Python: arithmetic, plain data, substitution, solutions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsfunc.types.sizes import DimExpr, SizeSum

NAMES = "abn"
SIZES = st.fixed_dictionaries({name: st.integers(1, 9) for name in NAMES})
CALLED: dict[str, Any] = {
    "+": lambda x, y: x + y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "max": max,
    "min": min,
}
forms: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(NAMES) | st.integers(-4, 6),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "*", "max", "min"]), inner, inner, inner).map(list),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 5)).map(list),
    ),
    max_leaves=6,
)


def value_of(form: Any, sizes: Mapping[str, int]) -> int:
    """Return what Python computes for a form."""
    if isinstance(form, int):
        return form
    if isinstance(form, str):
        return sizes[form]
    parts = [value_of(part, sizes) for part in form[1:]]
    return functools.reduce(CALLED[form[0]], parts)


def value_of_sum(size: SizeSum, sizes: Mapping[str, int]) -> int:
    return int(eval(str(size), {"max": max, "min": min}, dict(sizes)))


@given(forms, SIZES)
def test_a_sum_has_the_value_of_its_form(form: Any, sizes: dict[str, int]) -> None:
    found = SizeSum.of_form(form)
    assert value_of_sum(found, sizes) == value_of(form, sizes)
    assert found.names <= sizes.keys()


@given(forms, SIZES)
def test_a_sum_is_a_number_where_all_of_its_names_are(form: Any, sizes: dict[str, int]) -> None:
    known = {name: SizeSum.of_int(size) for name, size in sizes.items()}
    assert SizeSum.of_form(form).substitute(known).number == value_of(form, sizes)


@given(forms, forms, st.sampled_from(NAMES), SIZES)
def test_a_name_is_replaced_by_a_sum(
    form: Any, other: Any, name: str, sizes: dict[str, int]
) -> None:
    found = SizeSum.of_form(form).substitute({name: SizeSum.of_form(other)})
    inner = {**sizes, name: value_of(other, sizes)}
    assert value_of_sum(found, sizes) == value_of(form, inner)


@given(forms, forms)
def test_equal_sums_have_one_form(one: Any, other: Any) -> None:
    left, right = SizeSum.of_form(one), SizeSum.of_form(other)
    assert left + right == right + left and hash(left + right) == hash(right + left)
    assert left * right == right * left
    assert left - left == SizeSum.of_int(0)
    assert (left + right) * left == left * left + right * left


@given(forms, st.sampled_from(NAMES), st.integers(-5, 5).filter(bool), SIZES)
def test_a_sum_is_solved_for_a_name(
    form: Any, name: str, factor: int, sizes: dict[str, int]
) -> None:
    rest = SizeSum.of_form(form).substitute({name: SizeSum.of_int(sizes[name])})
    size = SizeSum.of_int(factor) * SizeSum.of_name(name) + rest
    value = SizeSum.of_int(factor) * SizeSum.of_name("m") + rest
    assert size.solve(name, value, {}) == SizeSum.of_name("m")


@given(forms, SIZES, st.integers(0, 5))
def test_bounds_hold(form: Any, sizes: dict[str, int], more: int) -> None:
    ranges = {name: (size, size + more) for name, size in sizes.items()}
    found = SizeSum.of_form(form)
    for there in (sizes, {name: size + more for name, size in sizes.items()}):
        assert found.least(ranges) <= value_of(form, there) <= found.most(ranges)


def test_a_product_of_many_terms_is_not_expanded() -> None:
    text = "(a+b+c+d)**4 * (e+f+g+h)**4"
    size = DimExpr(text).sum
    sizes = dict(zip("abcdefgh", range(1, 9), strict=True))
    assert value_of_sum(size, sizes) == eval(text, {}, sizes)
    assert any(size.operations())
    assert DimExpr(f"{text} - {text}").sum == SizeSum.of_int(0)


@pytest.mark.parametrize("form", [None, 1.5, True, [], ["+"], ["+", 1], ["^", 1, 2], [["+"], 1, 2]])
def test_other_data_is_not_a_size(form: Any) -> None:
    with pytest.raises(ValueError, match="expected a size, got"):
        SizeSum.of_form(form)
