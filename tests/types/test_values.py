"""Value specialization: equality of a value and the expected one."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tsfunc import Descriptors, pytrees
from tsfunc.errors import DescriptorViolation
from tsfunc.types import Value, compile_descriptors
from tsfunc.types.values import PathTexts, describe, path_text, same_value

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats(width=16)
    | st.complex_numbers(max_magnitude=2)
    | st.text(max_size=2)
    | st.binary(max_size=2)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3)
    ),
    max_leaves=5,
)


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __hash__(self) -> int:
        return 0


@given(values)
def test_a_copy_is_the_same(value: Any) -> None:
    assert same_value(value, copy.deepcopy(value))


@given(values, values)
def test_the_same_values_are_equal_and_of_one_type(one: Any, other: Any) -> None:
    assert same_value(one, other) == same_value(other, one)
    if same_value(one, other):
        assert type(one) is type(other)
        assert repr(one) == repr(other) or one == other


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ([1], [1.0]),
        ([1], (1,)),
        ({"a": 1}, {"a": True}),
        ({1}, {True}),
        ({1: "a"}, {True: "a"}),
        ({(1, 2): "a"}, {(1.0, 2): "a"}),
        (frozenset({(1,)}), frozenset({(True,)})),
        (None, False),
        ("a", b"a"),
        (Incomparable(), Incomparable()),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, device="meta")),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)),
        (torch.ones(2), torch.ones(2).to_sparse()),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
        (torch.ones(1), 1.0),
        (1.0, torch.ones(1)),
        (torch.ones(2), torch.zeros(2)),
    ],
)
def test_other_values(expected: Any, got: Any) -> None:
    assert not same_value(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (math.nan, float("nan")),
        (torch.float32, torch.float32),
        (math.sin, math.sin),
        (frozenset({1, "a"}), frozenset({"a", 1})),
        (torch.ones(2), torch.ones(2)),
        (range(3), range(3)),
    ],
)
def test_same_values(expected: Any, got: Any) -> None:
    assert same_value(expected, got)


ONES = [1, 1.0, True, 1 + 0j, 0, 0.0, -0.0, False, 0j]
literals = st.recursive(
    st.sampled_from(ONES),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(ONES), inner, max_size=2)
    ),
    max_leaves=3,
)


@given(literals, literals)
@settings(max_examples=200)
def test_literals_are_equal_if_they_are_spelled_alike(one: Any, other: Any) -> None:
    """1, 1.0 and True are equal in Python, and make different dtypes."""
    alike = _spelled(one) == _spelled(other)
    assert same_value(one, other) == alike == (Value(one) == Value(other))
    left, right = Descriptors({"x": one}), Descriptors({"x": other})
    assert (left == right) == (left <= right <= left) == alike
    f = compile_descriptors(left, inspect.signature(lambda x: None))
    if alike:
        f.check({"x": other})
        assert hash(left) == hash(right)
    else:
        with pytest.raises(DescriptorViolation):
            f.check({"x": other})


def _spelled(value: Any) -> str:
    """Return a literal as text, with dicts in one order."""
    if isinstance(value, dict):
        return str(sorted((repr(key), _spelled(each)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_spelled(each) for each in value]}"
    return repr(value)


def test_one_object_is_always_the_same() -> None:
    for value in (Incomparable(), torch.ones(2, requires_grad=True), torch.ones(2, device="meta")):
        assert same_value(value, value)


def test_arrays_compare_as_a_whole() -> None:
    np = pytest.importorskip("numpy")
    assert same_value(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
    assert not same_value(np.array([1, 2]), np.array([1, 3]))
    assert not same_value(np.array([1]), np.array([1.0]))
    assert not same_value(np.array([1]), np.array([[1]]))
    assert same_value(np.int64(3), np.int64(3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True (bool)"),
        ("a", "'a' (str)"),
        (torch.ones(2, 3), "f32[2, 3] cpu"),
        (torch.nn.Parameter(torch.ones(1)), "f32[1] cpu"),
        ("a" * 200, "'" + "a" * 76 + "... (str)"),
    ],
)
def test_values_as_text(value: object, text: str) -> None:
    assert describe(value) == text


def test_the_order_of_the_keys_of_a_dict_makes_no_other_type() -> None:
    """This holds for keys that Python can't sort, too."""
    for a, b in ((1 + 0j, 0), (1, "a"), ("b", "a"), (1, 0)):
        one, other = Descriptors({"x": [{a: 1, b: 2}]}), Descriptors({"x": [{b: 2, a: 1}]})
        assert one == other and hash(one) == hash(other) and one <= other <= one
        assert one != Descriptors({"x": [{b: 1, a: 2}]})
    assert Descriptors({"x": [{1: 2}]}) != Descriptors({"x": [{True: 2}]})


class Pair(NamedTuple):
    first: Any
    second: Any


class Boxed:
    """A container whose entries can't be hashed."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def __getitem__(self, entry: list[int]) -> Any:
        return self.children[entry[0]]


@pytest.fixture(scope="module")
def boxes() -> Iterator[None]:
    optree.register_pytree_node(
        Boxed,
        lambda boxed: (boxed.children, None, tuple([i] for i in range(len(boxed.children)))),
        lambda _, children: Boxed(*children),
        namespace=pytrees.NAMESPACE,
    )
    yield
    optree.unregister_pytree_node(Boxed, namespace=pytrees.NAMESPACE)


trees = st.recursive(
    st.builds(object),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=1) | st.integers(-1, 1), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Boxed, inner, inner)
    ),
    max_leaves=8,
)


@given(st.fixed_dictionaries({"x": trees, "y": trees}))
def test_the_text_of_a_path_evaluates_to_the_leaf(boxes: None, roots: dict[str, Any]) -> None:
    texts = PathTexts(roots)
    for name, tree in roots.items():
        paths, leaves, _ = optree.tree_flatten_with_path(
            tree, none_is_leaf=True, namespace=pytrees.NAMESPACE
        )
        for path, leaf in zip(paths, leaves, strict=True):
            text = texts((name, *path))
            assert eval(text, dict(roots)) is leaf
            assert text == path_text((name, *path), roots)


def test_entries_below_a_leaf_are_shown_as_they_are() -> None:
    assert path_text(("x", 0, "a", [1], 2), {"x": [Pair(1, 2)]}) == "x[0]['a'][[1]][2]"
