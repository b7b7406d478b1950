"""Laws of descriptors, over tensors, shapes and containers of all kinds."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.types.strategies import described
from tsfunc.errors import DescriptorViolation
from tsfunc.types import Bindings, Dim, MetaTensorType, as_descriptor, compile_descriptors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
ATTRIBUTES = ["dtype", "shape", "device", "requires_grad", "layout"]
NAMES = ["n", "m", "k"]
sizes = st.integers(0, 3)


class Pair(NamedTuple):
    one: Any
    two: Any


def check(written: object, value: object) -> Bindings:
    def f(x: Any) -> None: ...

    return compile_descriptors({"x": written}, inspect.signature(f)).check({"x": value})


def accepts(written: object, value: object) -> bool:
    try:
        check(written, value)
    except DescriptorViolation:
        return False
    return True


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape, device = draw(st.lists(sizes, max_size=3)), draw(st.sampled_from(["cpu", "meta"]))
    grad = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
    tensor = torch.zeros(shape, dtype=dtype, device=device)
    if draw(st.booleans()) and device == "cpu":
        tensor = tensor.to_sparse() if shape else tensor
    return tensor.requires_grad_(grad)


@st.composite
def metas(draw: st.DrawFn) -> MetaTensorType:
    low = draw(st.none() | sizes)
    name, step = draw(st.sampled_from(NAMES)), draw(st.sampled_from([None, None, 2]))
    bounded = Dim(name, low, draw(st.none() | st.integers(4, 6)), step)
    chosen = Dim(name, one_of=draw(st.sampled_from([(0, 3, 6), (2,)])))
    dim = (
        sizes
        | st.none()
        | st.sampled_from([*NAMES, "2*n+m", "n//2", "k*n-1"])
        | st.sampled_from([bounded, chosen])
    )
    leading = draw(st.sampled_from([0, 1, 1]))
    return described(
        dtype=draw(st.none() | st.sampled_from(DTYPES)),
        shape=draw(st.none() | st.lists(dim, max_size=3).map(lambda dims: [..., *dims][leading:])),
        device=draw(st.sampled_from([None, "cpu", "cuda", "cuda:1"])),
        requires_grad=draw(st.sampled_from([None, True, False])),
        layout=draw(st.sampled_from([None, torch.strided, torch.sparse_coo])),
    )


def guarantee(tensor: torch.Tensor, attributes: set[str]) -> MetaTensorType:
    """Return the attributes of a tensor that a descriptor may guarantee."""
    full = MetaTensorType.of(tensor)
    return MetaTensorType(**{name: getattr(full, name) for name in attributes})


@given(metas())
def test_a_repr_is_the_descriptor(meta: MetaTensorType) -> None:
    assert eval(repr(meta)) == meta
    assert MetaTensorType(meta.dtype, meta.rank, meta.shape) == MetaTensorType(
        meta.dtype, shape=meta.shape
    )


@given(metas(), metas())
def test_different_descriptors_read_differently(one: MetaTensorType, other: MetaTensorType) -> None:
    assert (str(one) == str(other)) == (one == other) == (repr(one) == repr(other))


@given(tensors(), st.sets(st.sampled_from(ATTRIBUTES)))
def test_the_metadata_of_a_tensor_accepts_it(tensor: torch.Tensor, attributes: set[str]) -> None:
    meta = guarantee(tensor, attributes)
    assert check(meta, tensor) == Bindings({}, {("x",): meta})
    assert accepts(MetaTensorType(rank=tensor.dim()), tensor)


@given(tensors(), tensors(), st.sets(st.sampled_from(ATTRIBUTES)))
def test_a_contract_is_kept_where_its_check_accepts(
    tensor: torch.Tensor, other: torch.Tensor, attributes: set[str]
) -> None:
    def f(x: Any) -> None: ...

    contract = compile_descriptors({"x": guarantee(tensor, attributes)}, inspect.signature(f))
    in_full = dataclasses.replace(contract, _fast_check=None)
    for value in (tensor, other, None):
        fits = accepts(guarantee(tensor, attributes), value)
        assert contract.is_kept({"x": value}) == in_full.is_kept({"x": value}) == fits


@given(tensors(), tensors(), st.sets(st.sampled_from(ATTRIBUTES)))
def test_another_tensor_is_refused_with_the_difference(
    tensor: torch.Tensor, other: torch.Tensor, attributes: set[str]
) -> None:
    mine, theirs = MetaTensorType.of(tensor), MetaTensorType.of(other)
    differing = {name for name in attributes if getattr(mine, name) != getattr(theirs, name)}
    meta = guarantee(tensor, attributes)
    assert accepts(meta, other) == (not differing)
    if differing:
        with pytest.raises(DescriptorViolation) as caught:
            check([meta], [other])
        lines = str(caught.value).split("\n")[1:-1]
        assert {line.split(":")[0].strip().split("[0]", 1)[1][:4] for line in lines} == {
            f".{name}"[:4] for name in differing
        }


@given(st.lists(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 2)), max_size=3)))
def test_names_are_consistent_iff_accepted(uses: list[list[tuple[str, int]]]) -> None:
    written = [MetaTensorType([name for name, _ in shape]) for shape in uses]
    value = [torch.zeros([size for _, size in shape]) for shape in uses]
    bound: dict[str, set[int]] = {}
    for name, size in (use for shape in uses for use in shape):
        bound.setdefault(name, set()).add(size)
    consistent = all(len(found) == 1 for found in bound.values())
    if consistent:
        assert check(written, value).sizes == {name: found.pop() for name, found in bound.items()}
        return
    with pytest.raises(DescriptorViolation) as caught:
        check(written, value)
    for name, found in bound.items():
        assert (f"{name} is " in str(caught.value)) == (len(found) > 1)


@given(st.integers(0, 4), sizes, st.none() | sizes, st.none() | st.integers(3, 5))
def test_bounds_and_expressions_hold_iff_accepted(
    n: int, size: int, low: int | None, high: int | None
) -> None:
    dim = Dim("n", low, high)
    assert accepts(MetaTensorType([dim]), torch.zeros(n)) == dim.admits(n)
    assert accepts(MetaTensorType(["2*n-1", "n"]), torch.zeros(size, n)) == (size == 2 * n - 1)


leaf = st.sampled_from(
    [(MetaTensorType(["n"]), torch.zeros(2)), (MetaTensorType(rank=0), torch.tensor(1)), (3, 3)]
)
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda p: ([d for d, _ in p], [v for _, v in p])),
        st.lists(inner, max_size=2).map(
            lambda p: (tuple(d for d, _ in p), tuple(v for _, v in p)),
        ),
        st.dictionaries(st.sampled_from(["b", "a"]), inner).map(
            lambda p: ({k: d for k, (d, _) in p.items()}, {k: v for k, (_, v) in p.items()})
        ),
        st.tuples(inner, inner).map(
            lambda p: (Pair(p[0][0], p[1][0]), Pair(p[0][1], p[1][1])),
        ),
    ),
    max_leaves=6,
)


@given(trees)
def test_a_call_and_its_descriptors_agree_on_every_leaf(tree: tuple[Any, Any]) -> None:
    written, value = tree
    contract = compile_descriptors({"x": written}, inspect.signature(lambda x: x))
    found = contract.check({"x": value}).leaves
    named: Any = {"x": value}
    paths, leaves, _ = optree.tree_flatten_with_path(named, none_is_leaf=True)
    for path, each in zip(paths, leaves, strict=True):
        described = contract.descriptors["x"].governing(path[1:])
        assert found.get(path) == (described.pop() if len(described) == 1 else None)
        assert (path in found) == isinstance(each, torch.Tensor)
    assert set(found) <= set(paths)
    assert as_descriptor(as_descriptor(written)) == as_descriptor(written)


@given(trees, trees)
def test_a_tree_of_another_structure_is_refused(
    one: tuple[Any, Any], other: tuple[Any, Any]
) -> None:
    assume(optree.tree_structure(one[1]) != optree.tree_structure(other[1]))
    # A named tuple is a tuple: where a plain one is guaranteed, it may come.
    assume(not _has_pair(other[1]))
    assert not accepts(one[0], other[1])


def _has_pair(value: Any) -> bool:
    nodes = optree.tree_leaves(value, is_leaf=lambda each: isinstance(each, Pair))
    return any(isinstance(each, Pair) for each in nodes)


@given(tensors() | st.none() | st.integers(0, 3), st.lists(metas(), min_size=1, max_size=3))
def test_a_union_accepts_the_values_of_its_alternatives(value: Any, written: list[Any]) -> None:
    plain = [MetaTensorType(m.dtype, requires_grad=m.requires_grad) for m in written]
    union = plain[0] | int
    for meta in plain[1:]:
        union = union | meta
    expected = isinstance(value, int) or any(accepts(meta, value) for meta in plain)
    assert accepts(union, value) == expected
    assert accepts(union | None, value) == (expected or value is None)
