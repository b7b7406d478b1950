"""Sizes: names with bounds, expressions, parsing and printing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsfunc.errors import DescriptorError
from tsfunc.types.dims import Dim, parse_dim, spell_dim
from tsfunc.types.sizes import DimExpr, solved_for

NAMES = ("a", "b", "n")
bounds = st.none() | st.integers(0, 6)


def _is_read(text: str) -> bool:
    """True if a text is an expression; a division by 0 is not one."""
    try:
        DimExpr(text)
    except DescriptorError:
        return False
    return True


atoms = st.sampled_from(NAMES) | st.integers(0, 9).map(str)
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]}{parts[2]})"
        ),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=6,
).filter(_is_read)


@st.composite
def dims(draw: st.DrawFn) -> Dim:
    step = draw(st.none() | st.integers(1, 3))
    chosen = draw(st.none() | st.lists(st.integers(0, 6), max_size=3))
    try:
        return Dim(draw(st.sampled_from(NAMES)), draw(bounds), draw(bounds), step, chosen)
    except DescriptorError:
        return Dim("n")  # no size remains


@pytest.mark.parametrize(
    ("spec", "form"),
    [
        (0, 0),
        (7, 7),
        ("n", Dim("n")),
        (" n ", Dim("n")),
        ("batch_2", Dim("batch_2")),
        (Dim("n", min=1), Dim("n", min=1)),
        ("2*n+1", DimExpr("2 * n + 1")),
        ("a*b", DimExpr("a * b")),
        ("n**2", DimExpr("n ** 2")),
        ("(n-1)*(n+1)", DimExpr("(n - 1) * (n + 1)")),
        ("2**3", 8),
        ("-(1) + n", DimExpr("-1 + n")),
        ("2 * 3", 6),
        ("7 // 2", 3),
        ("(n)", Dim("n")),
        (None, None),
    ],
)
def test_parse_dim(spec: object, form: object) -> None:
    assert parse_dim(spec) == form


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (-1, r"expected a size of 0 or more, got -1; write None"),
        ("3 - 5", r"expected a size of 0 or more, got -2"),
        ("4 // 0", r"'4 // 0' divides by zero"),
        (True, r"a dim: expected a non-negative int, .* got True of type bool"),
        (2.0, r"got 2\.0 of type float"),
        ("", r"'' is neither a name nor an expression; write a Python identifier"),
        ("2n", r"'2n' is neither a name nor an expression"),
        ("for", r"'for' is neither a name nor an expression"),
        ("n\0", r"is neither a name nor an expression"),
        ("n / 2", r"'n / 2': an expression joins integers and names .*'n / 2' is none of these"),
        ("n + f(2)", r"'f\(2\)' is none of these"),
        ("2 ** n", r"'2 \*\* n' is none of these"),
        ("n ** 9", r"powers up to 8; 'n \*\* 9' is none of these"),
        ("(n ** 2) ** 2", r"'\(n \*\* 2\) \*\* 2' is none of these"),
        ("n ** -1", r"'n \*\* \(-1\)' is none of these"),
        ("n + True", r"'True' is none of these"),
        ("n + 1.5", r"'1\.5' is none of these"),
        ("n" + "+1" * 100, r"at most 200 characters, got 201"),
        ("-" * 198 + "n", None),
    ],
)
def test_parse_dim_refuses(spec: object, message: str | None) -> None:
    if message is None:
        assert isinstance(parse_dim(spec), DimExpr)
        return
    with pytest.raises(DescriptorError, match=message):
        parse_dim(spec)


@pytest.mark.parametrize(
    ("name", "lower", "upper", "message"),
    [
        ("2n", None, None, r"Dim\('2n'\): expected a Python identifier as name, got '2n'"),
        ("class", None, None, r"expected a Python identifier as name, got 'class'"),
        (3, None, None, r"got 3"),
        ("n", -1, None, r"Dim\('n', min=-1\): min: expected a non-negative int or None, got -1"),
        ("n", None, 2.5, r"max: expected a non-negative int or None, got 2\.5"),
        ("n", True, None, r"min: expected a non-negative int or None, got True"),
        ("n", 4, 3, r"Dim\('n', min=4, max=3\): no size is at least 4 and at most 3"),
    ],
)
def test_dim_refuses(name: str, lower: int, upper: int, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        Dim(name, lower, upper)


@pytest.mark.parametrize(
    ("dim", "admitted"),
    [
        (Dim("n"), [0, 1, 2, 3, 4]),
        (Dim("n", min=2), [2, 3, 4]),
        (Dim("n", max=2), [0, 1, 2]),
        (Dim("n", 1, 3), [1, 2, 3]),
        (Dim("n", 2, 2), [2]),
    ],
)
def test_bounds_are_inclusive(dim: Dim, admitted: list[int]) -> None:
    assert [size for size in range(5) if dim.admits(size)] == admitted


def test_dims_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dim("n").name = "m"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        DimExpr("n+1").text = "m"  # type: ignore[misc]


def test_dim_reads_well() -> None:
    written = [Dim("n"), Dim("n", min=2), Dim("n", max=8), Dim("n", 2, 8)]
    assert list(map(str, written)) == ["n", "n>=2", "n<=8", "2<=n<=8"]


@given(dims())
def test_repr_is_the_dim(dim: Dim) -> None:
    assert eval(repr(dim)) == dim


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"multiple_of": 0}, r"multiple_of: expected a positive int or None, got 0"),
        ({"multiple_of": "2"}, r"multiple_of: expected a positive int or None, got '2'"),
        ({"one_of": 3}, r"one_of: expected the allowed sizes, .* got 3"),
        ({"one_of": [2, -1]}, r"non-negative ints, got \[2, -1\]"),
        ({"one_of": []}, r"no size is one of \[\]"),
        ({"one_of": [1, 2], "min": 3}, r"no size is at least 3 and one of \[1, 2\]"),
        (
            {"min": 5, "max": 7, "multiple_of": 4},
            r"no size is at least 5 and at most 7 and a multiple of 4",
        ),
    ],
)
def test_bounds_that_no_size_keeps(words: dict[str, Any], message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        Dim("n", **words)


def test_bounds_have_one_form() -> None:
    assert Dim("n", min=0, multiple_of=1) == Dim("n")
    assert Dim("n", min=3, max=11, multiple_of=4) == Dim("n", min=4, max=8, multiple_of=4)
    assert Dim("n", one_of=[4, 2, 4, 9], max=8) == Dim("n", one_of=(2, 4))
    assert repr(Dim("n", min=2, multiple_of=3)) == "Dim('n', min=3, multiple_of=3)"


@given(dims(), dims(), st.integers(0, 7))
def test_hull_admits_the_sizes_of_both(one: Dim, other: Dim, size: int) -> None:
    assert one.hull(other).admits_all(one) and one.hull(other).admits_all(other)
    assert one.hull(other).admits(size) or not (one.admits(size) or other.admits(size))
    assert not one.admits_all(other) or one.hull(other) == one
    if one.admits_all(other):
        assert one.admits(size) or not other.admits(size)


@given(dims(), st.integers(0, 9))
def test_bounds_of_a_size_are_those_that_it_keeps(dim: Dim, size: int) -> None:
    kept = dim.bounds_of(size)
    assert kept.admits(size) and kept.admits_all(dim) and kept.name == dim.name
    assert (kept == dim) == dim.admits(size)


@given(dims(), dims(), st.integers(0, 7))
def test_meet_admits_the_common_sizes(one: Dim, other: Dim, size: int) -> None:
    both = one.admits(size) and other.admits(size)
    try:
        assert one.meet(other).admits(size) == both
    except DescriptorError:
        assert not both


@given(expressions, st.fixed_dictionaries({name: st.integers(0, 9) for name in NAMES}))
def test_an_expression_equals_its_evaluation_by_python(text: str, sizes: dict[str, int]) -> None:
    expression = DimExpr(text)
    assert set(expression.names) == {name for name in NAMES if name in text}
    try:
        expected = eval(text, {}, sizes)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            expression.evaluate(sizes)
        return
    assert expression.evaluate(sizes) == expected


polynomials = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})"),
        st.tuples(st.sampled_from(NAMES), st.integers(0, 3)).map(lambda p: f"{p[0]}**{p[1]}"),
    ),
    max_leaves=6,
)
SIZES = st.fixed_dictionaries({name: st.integers(0, 9) for name in NAMES})


@given(expressions | polynomials, SIZES)
def test_the_normal_text_is_the_same_number(text: str, sizes: dict[str, int]) -> None:
    expression = DimExpr(text)
    try:
        assert eval(expression.normal, {}, sizes) == expression.evaluate(sizes)
    except ZeroDivisionError:
        return
    assert DimExpr(expression.normal).normal == expression.normal


@given(polynomials, polynomials)
def test_polynomials_that_are_equal_have_one_normal_text(one: str, other: str) -> None:
    # A polynomial of this degree that is zero at so many points is zero.
    points = [{"a": a, "b": b, "n": n} for a in range(20) for b in (3, 50) for n in (7, 900)]
    same = all(eval(one, {}, each) == eval(other, {}, each) for each in points)
    assert same or DimExpr(one).normal != DimExpr(other).normal
    assert DimExpr(f"({one}) + ({other})").normal == DimExpr(f"({other}) + ({one})").normal
    assert DimExpr(f"({one}) * ({other})").normal == DimExpr(f"({other}) * ({one})").normal
    assert DimExpr(f"({one}) - ({one})").normal == "0"


@given(polynomials | expressions, SIZES, st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)))
def test_an_expression_is_not_above_its_most(
    text: str, sizes: dict[str, int], more: dict[str, int]
) -> None:
    ranges = {
        name: (size, size + more[name] if name in more else None) for name, size in sizes.items()
    }
    high = {name: size + more.get(name, 7) for name, size in sizes.items()}
    for low in (sizes, high, {**high, "n": sizes["n"]}):
        try:
            assert DimExpr(text).evaluate(low) <= DimExpr(text).sum.most(ranges)
        except ZeroDivisionError:
            continue


@given(polynomials, st.sampled_from(NAMES), SIZES)
def test_an_expression_is_solved_for_a_name(text: str, name: str, sizes: dict[str, int]) -> None:
    found = solved_for(text, name)
    if found is None:
        return
    slope, rest = (DimExpr(part) for part in found)
    assert name not in (*slope.names, *rest.names)
    value = slope.evaluate(sizes) * sizes[name] + rest.evaluate(sizes)
    assert value == DimExpr(text).evaluate(sizes)


@given(expressions)
def test_an_expression_has_one_spelling(text: str) -> None:
    expression = DimExpr(text)
    assert DimExpr(str(expression)) == expression
    assert str(DimExpr(str(expression))) == str(expression)
    assert eval(repr(expression)) == expression


@given(dims() | st.integers(0, 9) | st.none() | expressions.filter(lambda t: not t.isdigit()))
def test_the_text_of_a_value_is_read_back(spec: object) -> None:
    try:
        form = parse_dim(spec)
    except DescriptorError:
        return  # a negative number or a division by zero
    assert parse_dim(spell_dim(form)) == form


def test_an_unbound_name_has_no_size() -> None:
    with pytest.raises(KeyError, match="m"):
        DimExpr("n + m").evaluate({"n": 1})
