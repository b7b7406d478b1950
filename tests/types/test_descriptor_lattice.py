"""Sets of descriptors: their order and joins, from examples, widened, split, and as text."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.types.strategies import Base, Color, Leaf, Left, Right
from tsfunc import Descriptors, Dim, MetaTensorType, infer_descriptors, specialize
from tsfunc.errors import DescriptorError, DescriptorViolation
from tsfunc.types import (
    ANY,
    NONE,
    STR,
    Descriptor,
    TSDict,
    TSList,
    TSUnion,
    as_descriptor,
    compile_descriptors,
)


class Pair(NamedTuple):
    one: Any
    two: Any


sizes = st.sampled_from([1, 2, 3, "n", "m", None])
named = sizes | st.sampled_from([Dim("k", min=2), Dim("k", max=3), "n + m"])


def metas(sizes: st.SearchStrategy[Any]) -> st.SearchStrategy[MetaTensorType]:
    shapes = st.lists(sizes, max_size=2)
    return st.builds(
        MetaTensorType,
        dtype=st.sampled_from([None, torch.float32, torch.int64]),
        shape=st.none() | shapes | shapes.map(lambda dims: [..., *dims]),
        device=st.sampled_from([None, "cpu"]),
    )


leaves: st.SearchStrategy[Any] = st.sampled_from(
    [ANY, int, float, bool, str, Base, Left, Right, Leaf, Color, None, 1, 2, True, "a",
     Color.RED, Color.BLUE, 1.5]
)  # fmt: skip


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        inner.map(lambda each: TSList(as_descriptor(each))),
        inner.map(lambda each: TSDict(STR, as_descriptor(each))),
        inner.map(lambda each: _optional(as_descriptor(each))),
    )


def _optional(each: Descriptor) -> Descriptor:
    if isinstance(each, TSUnion) or each in (ANY, NONE):
        return each
    return TSUnion((each, NONE))


descriptors = st.recursive(leaves | metas(sizes), grow, max_leaves=4).map(as_descriptor)
described = st.dictionaries(st.sampled_from("xy"), descriptors).map(Descriptors)

many = sizes | st.sampled_from(
    [Dim("k", min=2), Dim("k", max=3), "n + 1", "2*n", "n + m", "k*n", "n - 1", "m // 2"]
)
computed = st.dictionaries(
    st.sampled_from("xyz"), st.recursive(leaves | metas(many), grow, max_leaves=3)
).map(Descriptors)

# Values without common sizes, whose join is the least of all descriptors.
parts = st.recursive(
    st.sampled_from([1, 2, True, False, "a", "b", 1.5, None, MetaTensorType([2], dtype=float)]),
    lambda inner: st.lists(inner, max_size=2) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
WIDER = [
    "int", "bool", "str", "float", "None", "int | None", "f64[2]", "tensor[2]", "tensor[2] | None",
    "List[int]", "List[int | None]", "List[Any]", "Tuple[int, ...]", "Tuple[Any, ...]",
    "Tuple[int, int]", "Tuple[int | None, Any]", "[int, Any]", "[Any]", "[Literal[1] | None, int]",
    "List[List[int]]", "List[Any] | None", "Literal[1]", "Literal[1] | None", "Tuple[()]", "[]",
]  # fmt: skip


def alike(one: Descriptors, other: Descriptors) -> bool:
    """True if they are equal but for the names of sizes."""
    return one <= other and other <= one


def alike_metas(one: MetaTensorType, other: MetaTensorType) -> bool:
    return one <= other and other <= one


class TestLaws:
    @given(described, described, described)
    @settings(max_examples=150)
    def test_is_an_order(self, a: Descriptors, b: Descriptors, c: Descriptors) -> None:
        assert a <= a and a <= Descriptors({})
        if a <= b and b <= c:
            assert a <= c

    @given(described, described)
    @settings(max_examples=200)
    def test_a_join_is_above_both(self, a: Descriptors, b: Descriptors) -> None:
        joined = a.join(b)
        assert a <= joined and b <= joined
        assert joined == b.join(a) and a.join(a) == a
        assert (a <= b) == alike(joined, b)
        assert joined == b or not a < b

    @given(computed, computed)
    @settings(max_examples=300)
    def test_a_join_is_above_both_with_bounds_and_computed_sizes(
        self, a: Descriptors, b: Descriptors
    ) -> None:
        joined = a.join(b)
        assert a <= joined and b <= joined
        assert joined == b.join(a) and a.join(a) == a
        assert Descriptors.parse(str(joined), {"Pair": Pair}) == joined

    @given(st.lists(parts, max_size=3), st.lists(parts, max_size=3))
    @settings(max_examples=200)
    def test_a_join_of_values_is_the_least(self, ones: list[Any], others: list[Any]) -> None:
        """Every type above the descriptors of some values is above their join."""
        examples = [Descriptors({"x": each, "y": None}) for each in (*ones, *others)]
        assume(examples)
        joined = functools.reduce(Descriptors.join, examples)
        for wider in (Descriptors.parse(f"x: {text}") for text in WIDER):
            if all(each <= wider for each in examples):
                assert joined <= wider

    @given(described, described, described)
    @settings(max_examples=150)
    def test_a_join_is_associative(self, a: Descriptors, b: Descriptors, c: Descriptors) -> None:
        assert alike(a.join(b).join(c), a.join(b.join(c)))

    @given(described)
    def test_text_is_read_back(self, a: Descriptors) -> None:
        scope = {"Pair": Pair}
        assert Descriptors.parse(str(a), scope) == a
        assert Descriptors.parse(", ".join(str(a).splitlines()), scope) == a

    @given(metas(named), metas(named))
    def test_of_tensors_alone(self, a: MetaTensorType, b: MetaTensorType) -> None:
        joined = a.join(b)
        assert a <= joined and b <= joined and (a <= b) == (joined <= b)
        assert joined == b.join(a) and MetaTensorType.parse(str(joined)) == joined

    @given(metas(sizes), metas(sizes), metas(sizes))
    def test_a_join_is_monotone(
        self, a: MetaTensorType, b: MetaTensorType, c: MetaTensorType
    ) -> None:
        """Without bounds and expressions: NOTE [joins of several]."""
        assert a.join(c) <= a.join(b).join(c)

    @pytest.mark.parametrize(
        ("one", "other", "joined"),
        [
            ("[n>=2, 64]", "[3, 32]", "[n>=2, m]"),
            ("[n>=2, 64]", "[1, 32]", "[n, m]"),
            ("[2<=n<=8, 64]", "[9, 32]", "[n>=2, m]"),
            ("[n>=4 and n % 4 == 0, 64]", "[6, 32]", "[n>=4, m]"),
            ("[n in {2, 4}, 64]", "[2, 32]", "[n in {2, 4}, m]"),
            ("[n in {2, 4}, 64]", "[3, 32]", "[n, m]"),
            ("[n>=2, 64]", "[m>=3, 32]", "[m>=2, k]"),
            ("[n in {2, 3, 7}, 64]", "[2<=n<=3, 32]", "[n in {2, 3, 7}, m]"),
            ("[n, 2 * n, 64]", "[3, 6, 32]", "[n, 2 * n, m]"),
            ("[n, 2 * n, 64]", "[3, 7, 32]", "[n, m, k]"),
            ("[n, 2 * n, 64]", "[m, 2 * m, 32]", "[m, 2 * m, k]"),
            ("[n, m, n + m]", "[m, n, m + n]", "[m, n, m + n]"),
            ("[a, b, a * b, 2]", "[2, 3, 6, 3]", "[a, b, a * b, n]"),
            ("[7, n]", "[8, 3]", "[m, n]"),  # the name stays where it is
            ("[n, 3]", "[7, n]", "[n, m]"),
            ("[n, 4] strides[4, 1]", "[3, 4] strides[4, 1]", "[n, 4] strides[4, 1]"),
            ("[n, k] strides[k, 1]", "[3, 5] strides[5, 1]", "[n, k] strides[k, 1]"),
        ],
    )
    def test_facts_kept_about_sizes(self, one: str, other: str, joined: str) -> None:
        a, b = (MetaTensorType.parse(f"f32{text}") for text in (one, other))
        assert str(a.join(b)) == f"f32{joined}" and a.join(b) == b.join(a)

    def test_names_of_joins_of_several_may_differ(self) -> None:
        """NOTE [joins of several]: names can't be both kept and independent of the order."""
        x, y, z = MetaTensorType(["n", 3]), MetaTensorType([7, "n"]), MetaTensorType([7, 4])
        one, other = x.join(z).join(y), x.join(z.join(y))
        assert z <= y and str(x.join(z)) == "tensor[n, m]" and alike_metas(one, other)
        low, least = MetaTensorType([Dim("n", min=2)]), MetaTensorType(["n"])
        three, four = MetaTensorType([3]), MetaTensorType([4])
        assert low.join(three.join(four)) == least and low.join(three).join(four) == low

    def test_the_order_of_a_dict_is_that_of_both(self) -> None:
        ab, ba = ({"a": 1, "b": 2}, {"b": 3, "a": 1})
        one, other = Descriptors({"x": ab}), Descriptors({"x": ba})
        assert one.join(other) == other.join(one)
        assert str(Descriptors({"x": ba}).join({"x": {"b": 4, "a": 1}})) == (
            "x: {'b': int, 'a': Literal[1]}"
        )


values = st.recursive(
    st.sampled_from([1, 2, True, "a", None, 1.5, Color.RED])
    | st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        st.lists(st.integers(0, 3), max_size=2),
        st.sampled_from([torch.float32, torch.int64]),
    ),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=4,
)
examples = st.fixed_dictionaries({"x": values, "y": values})


def keeps(d: Descriptors, example: dict[str, Any]) -> bool:
    contract = compile_descriptors(d, inspect.signature(lambda x, y: None))
    try:
        contract.check(example)
    except DescriptorViolation:
        return False
    return True


class TestExamples:
    @given(st.lists(examples, min_size=1, max_size=3))
    def test_inferred_descriptors_fit_all_examples(self, several: list[dict[str, Any]]) -> None:
        d = infer_descriptors(*several)
        assert all(keeps(d, each) for each in several)
        for each in several:
            assert d.widen(each) == d

    @given(examples, st.lists(examples, min_size=1, max_size=2))
    def test_the_order_determines_which_calls_are_kept(
        self, example: dict[str, Any], several: list[dict[str, Any]]
    ) -> None:
        d = infer_descriptors(*several)
        assert (infer_descriptors(example) <= d) == keeps(d, example)

    def test_equal_sizes_share_a_name_if_they_do_in_every_example(self) -> None:
        a = {"x": torch.ones(3, 64), "y": [torch.ones(3), torch.ones(3)]}
        b = {"x": torch.ones(5, 64), "y": [torch.ones(5), torch.ones(7)]}
        assert str(infer_descriptors(a, b)) == (
            "x: f32[n, 64] cpu no_grad strided\n"
            "y: [f32[n] cpu no_grad strided, f32[m] cpu no_grad strided]"
        )

    def test_sizes_0_and_1_are_sizes_as_others(self) -> None:
        d = infer_descriptors({"x": torch.ones(1)}, {"x": torch.ones(0)}, {"x": torch.ones(7)})
        assert str(d) == "x: f32[n] cpu no_grad strided"
        assert keeps(d, {"x": torch.ones(1), "y": 0})

    @pytest.mark.parametrize(
        ("one", "other", "text"),
        [
            (3, 3, "Literal[3]"),
            (3, 4, "int"),
            (3, True, ""),
            (3, None, "Literal[3] | None"),
            ("a", "b", "str"),
            (1.5, 2.5, "float"),
            (True, False, "bool"),
            (Color.RED, Color.BLUE, "tests.types.strategies.Color"),
            (torch.float32, torch.int64, "torch.dtype"),
            ([1, 2], [1, 3], "[Literal[1], int]"),
            ([1, 2], [1], "List[int]"),
            ((1, 2), (1, 2, 3), "Tuple[int, ...]"),
            ({"a": 1}, {"a": 2}, "{'a': int}"),
            ({"a": 1}, {"b": 1}, "Dict[str, Literal[1]]"),
            (torch.ones(2), torch.ones(3, 2), "f32[..., 2] cpu no_grad strided"),
            (torch.ones(2), torch.ones(3).double(), "tensor[n] cpu no_grad strided"),
            (torch.ones(2), torch.ones(2).requires_grad_(), "f32[2] cpu strided"),
            (torch.ones(2), None, "f32[2] cpu no_grad strided | None"),
            (torch.ones(2), 3, ""),
            (Left(), Right(), "tests.types.strategies.Base"),
        ],
    )
    def test_of_two(self, one: Any, other: Any, text: str) -> None:
        d = infer_descriptors({"x": one}, {"x": other})
        assert str(d) == (f"x: {text}" if text else "")
        assert keeps(d, {"x": one, "y": 0}) and keeps(d, {"x": other, "y": 0})

    def test_a_parameter_that_an_example_lacks_is_open(self) -> None:
        assert list(infer_descriptors({"x": 1, "y": 2}, {"x": 1})) == ["x"]

    def test_a_new_input_widens(self) -> None:
        d = infer_descriptors({"x": torch.ones(3, 4)})
        f = specialize(lambda x: 2 * x, d)
        with pytest.raises(DescriptorViolation):
            f(torch.ones(5, 4))
        wider = d.widen({"x": torch.ones(5, 4)})
        assert d < wider and str(wider) == "x: f32[n, 4] cpu no_grad strided"
        f = specialize(lambda x: 2 * x, wider)
        assert f(torch.ones(5, 4)).shape == (5, 4) and f(torch.ones(8, 4)).shape == (8, 4)
        assert f.cache_info().programs == 1
        assert MetaTensorType.of(torch.ones(3)).widen(torch.ones(4)).shape == ("n",)


class TestSplit:
    def test_the_join_of_the_parts_is_the_whole(self) -> None:
        wide = Descriptors.parse("x: tensor[n, 3] cpu, train: bool")
        parts = wide.split(n=[2, 3, Dim("n", min=4)], train=[True, False])
        assert len(parts) == 6 and all(part < wide for part in parts)
        joined = parts[0]
        for part in parts[1:]:
            joined = joined.join(part)
        assert alike(joined, wide)

    def test_by_a_parameter(self) -> None:
        wide = Descriptors.parse("x: List[tensor[?]] | None")
        one, other = wide.split(x=[None, Descriptors.parse("x: List[f32[?]]")["x"]])
        assert str(one) == "x: None" and str(other) == "x: List[f32[?]]"

    def test_of_a_tensor(self) -> None:
        wide = MetaTensorType(["n", "2*n"])
        parts = wide.split(dtype=[torch.float32, torch.int64], n=[3])
        assert list(map(str, parts)) == ["f32[3, 6]", "i64[3, 6]"]
        assert MetaTensorType(rank=2).split(shape=[[2, 3], ["n", "n"]])[1] == MetaTensorType(
            ["n", "n"]
        )

    @pytest.mark.parametrize(
        ("by", "message"),
        [
            ({"z": [1]}, r"split\(z=\.\.\.\): there is no parameter and no size 'z'; there are: x"),
            ({"n": [9]}, r"split\(n=\.\.\.\): f32\[9, 3\] cpu is not narrower|not narrower than"),
            ({"n": 3}, r"split\(n=\.\.\.\): expected a list of alternatives, got 3 of type int"),
            ({"n": ["m"]}, r"expected a size, or a Dim\('n', \.\.\.\) with bounds, got 'm'"),
            ({"n": [-1]}, r"split\(n=\.\.\.\): expected a size of 0 or more"),
            ({"x": [int]}, r"split\(x=\.\.\.\): int is not narrower than f32\[n<=8, 3\] cpu"),
        ],
    )
    def test_splits_that_are_not_narrower_are_refused(
        self, by: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(DescriptorError, match=message):
            Descriptors.parse("x: f32[n<=8, 3] cpu").split(**by)

    @pytest.mark.parametrize(
        ("by", "message"),
        [
            ({"dtype": [torch.int64]}, r"i64\[n\] is not narrower than f32\[n\]"),
            ({"rank": [2]}, r"is not narrower than f32\[n\]"),
            ({"k": [2]}, r"expected an attribute of f32\[n\] or one of its sizes \(n\), got 'k'"),
        ],
    )
    def test_a_tensor_refuses(self, by: dict[str, Any], message: str) -> None:
        with pytest.raises(DescriptorError, match=message):
            MetaTensorType.parse("f32[n]").split(**by)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Descriptors([1]), r"expected a dict of parameter name to descriptor, got \[1\]"),  # type: ignore[arg-type]
        (lambda: Descriptors({"1x": int}), r"expected names of parameters, got '1x'"),
        (
            lambda: Descriptors.parse("x f32[n]"),
            r"expected a descriptor of a parameter, .*got 'x f32\[n\]'",
        ),
        (lambda: Descriptors.parse("x: int, x: int"), r"describes 'x' twice"),
        (lambda: Descriptors.parse("x: f32[n"), r"expected '\]' after the dims"),
        (infer_descriptors, "expected at least one example, got none"),
        (lambda: infer_descriptors([1]), r"each example to be a dict .* got \[1\] of type list"),  # type: ignore[arg-type]
        (lambda: MetaTensorType().join(3), r"expected a MetaTensorType, got 3 of type int"),  # type: ignore[arg-type]
    ],
)
def test_bad_descriptors_have_messages(make: Any, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        make()


def test_it_is_a_frozen_mapping() -> None:
    d = Descriptors({"x": int, "y": [MetaTensorType([3])]})
    assert dict(d) == {"x": as_descriptor(int), "y": as_descriptor([MetaTensorType([3])])}
    assert d == eval(repr(d)) and hash(d) == hash(Descriptors(dict(d)))
    with pytest.raises(TypeError):
        d["x"] = int  # type: ignore[index]
