"""vmap is the stacked loop: its arguments and results; operators without a rule."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.transforms.support import Api, as_torch_func, loop, same
from tsfunc import vmap
from tsfunc.errors import SlowFallbackWarning

Point = namedtuple("Point", ["x", "y"])

SIZE = 3


# The law: vmap(f) is the stacked loop.

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)


@st.composite
def mapped_tensor(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw a tensor with a dim of SIZE, and the dim, counted from either end."""
    shape = list(draw(shapes))
    at = draw(st.integers(0, len(shape)))
    shape.insert(at, SIZE)
    dim = at - len(shape) if draw(st.booleans()) else at
    return torch.randn(shape), dim


@st.composite
def tree_of(draw: st.DrawFn, leaf: st.SearchStrategy[Any], depth: int = 2) -> Any:
    kind = draw(st.sampled_from(["leaf", "leaf", "tuple", "list", "dict", "point"]))
    if kind == "leaf" or depth == 0:
        return draw(leaf)
    one, two = draw(tree_of(leaf, depth - 1)), draw(tree_of(leaf, depth - 1))
    if kind == "point":
        return Point(one, two)
    return {"tuple": (one, two), "list": [one, two], "dict": {"b": one, "a": two}}[kind]


def pair_tree(tree: Any, which: int) -> Any:
    """Return the first or second element of the pairs at the leaves of a tree."""
    if isinstance(tree, dict):
        return {k: pair_tree(v, which) for k, v in tree.items()}
    if isinstance(tree, Point):
        return Point(*(pair_tree(v, which) for v in tree))
    if isinstance(tree, list):
        return [pair_tree(v, which) for v in tree]
    if isinstance(tree, tuple) and not isinstance(tree[0], Tensor | int | float):
        return tuple(pair_tree(v, which) for v in tree)
    return tree[which]


constants = st.one_of(
    st.integers(1, 5).map(lambda n: (n, None)),
    st.floats(0.5, 2).map(lambda n: (n, None)),
    shapes.map(lambda s: (torch.randn(s), None)),
)


def scale(value: Any) -> Any:
    """Compute on each leaf, in the same way for tensors and numbers."""
    if isinstance(value, dict):
        return {k: scale(v) for k, v in value.items()}
    if isinstance(value, Point):
        return Point(*(scale(v) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(scale(v) for v in value)
    if isinstance(value, Tensor):
        return (value * 2 + value.abs().sum()).transpose(0, -1) if value.dim() else value * 3
    return torch.tensor(float(value))


@settings(max_examples=60)
@given(first=mapped_tensor(), rest=tree_of(st.one_of(mapped_tensor(), constants)))
def test_any_tree_with_any_dims(first: Any, rest: Any) -> None:
    args = (first[0], pair_tree(rest, 0))
    dims = (first[1], pair_tree(rest, 1))
    same(
        vmap(lambda *a: scale(a), in_dims=dims)(*args), loop(lambda *a: scale(a), SIZE, dims)(*args)
    )


@settings(max_examples=40)
@given(x=mapped_tensor(), data=st.data())
def test_any_out_dim(x: Any, data: st.DataObject) -> None:
    value, dim = x
    rank = value.dim()
    to = data.draw(st.integers(-rank, rank - 1))
    got = vmap(lambda a: (a.sin(), a.sum()), in_dims=dim, out_dims=(to, 0))(value)
    same(got, loop(lambda a: (a.sin(), a.sum()), SIZE, dim, (to, 0))(value))


@settings(max_examples=40)
@given(depth=st.integers(1, 3), shape=shapes, data=st.data())
def test_any_nesting(depth: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    """Each level maps any dim of one operand, the other, or both."""

    def func(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * y.sum() + x.sum() * torch.cos(y)

    got: Callable[..., Any] = func
    want: Callable[..., Any] = func
    ranks = [len(shape), len(shape)]
    order = []
    for _ in range(depth):
        which = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        dims = []
        for i in range(2):
            dims.append(data.draw(st.integers(0, ranks[i])) if which[i] else None)
            ranks[i] += which[i]
        got, want = vmap(got, in_dims=tuple(dims)), loop(want, SIZE, tuple(dims))
        order.append(dims)
    sizes = [list(shape), list(shape)]
    for dims in order:
        for i, dim in enumerate(dims):
            if dim is not None:
                sizes[i].insert(dim, SIZE)
    x, y = (torch.randn(s) for s in sizes)
    same(got(x, y), want(x, y), rtol=1e-4, atol=1e-5)


@settings(max_examples=25)
@given(size=st.integers(1, 7), chunk=st.integers(1, 9), at=st.integers(0, 1))
def test_any_chunk_size(size: int, chunk: int, at: int) -> None:
    x = torch.randn(size, 4) if at == 0 else torch.randn(4, size)
    got = vmap(lambda a: (a.sum(), {"k": a}), in_dims=at, out_dims=(0, 1), chunk_size=chunk)(x)
    same(got, loop(lambda a: (a.sum(), {"k": a}), size, at, (0, 1))(x))


# Arguments and results.

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()

CALLS: dict[str, Callable[[Api], Any]] = {
    "out_dims as a dict": lambda T: T.vmap(
        lambda x: {"a": x, "b": x.sum()}, out_dims={"a": 1, "b": 0}
    )(X),
    "out_dims as a tuple of one": lambda T: T.vmap(torch.sin, out_dims=(1,))(X),
    "one out_dim for all": lambda T: T.vmap(lambda x: (x, [x, x * 2]), out_dims=1)(X),
    "a list returned": lambda T: T.vmap(lambda x: [x, x.sum()], out_dims=[1, 0])(X),
    "a named tuple": lambda T: T.vmap(lambda p: Point(p.y, p.x * 2))(Point(X, X + 1)),
    "an ordered dict": lambda T: T.vmap(lambda d: d["b"] - d["a"])(
        OrderedDict([("b", X), ("a", X * 2)])
    ),
    "in_dims with lists and dicts": lambda T: T.vmap(
        lambda d: d["a"][0] * d["b"], in_dims=({"a": [0, None], "b": None},)
    )({"a": [X, 3], "b": W}),
    "in_dims, a prefix": lambda T: T.vmap(lambda d, n: d["a"] * n, in_dims=(0, None))({"a": X}, 2),
    "a number": lambda T: T.vmap(lambda x, n: x * n, in_dims=(0, None))(X, 3),
    "a string": lambda T: T.vmap(lambda x, how: getattr(x, how)(), in_dims=(0, None))(X, "sum"),
    "None as an input": lambda T: T.vmap(lambda x, n: x if n is None else n, in_dims=(0, None))(
        X, None
    ),
    "None as an output": lambda T: T.vmap(lambda x: (x, None), out_dims=(0, None))(X),
    "a number as an output": lambda T: T.vmap(lambda x: (x, 3), out_dims=(0, None))(X),
    "a tensor from outside, not stacked": lambda T: T.vmap(lambda x: (x, W), out_dims=(0, None))(X),
    "a tensor from outside, stacked": lambda T: T.vmap(lambda x: W)(X),
    "the input itself": lambda T: T.vmap(lambda x: (x, x))(X),
    "keyword arguments": lambda T: T.vmap(lambda x, *, y: (x * y).sum())(X, y=W),
    "a mapped argument by keyword": lambda T: T.vmap(lambda x, y: (x * y).sum())(X, y=X),
    "a partial": lambda T: T.vmap(functools.partial(torch.mul, W))(X),
    "a module": lambda T: T.vmap(nn.ReLU())(X),
    "a method": lambda T: T.vmap(W.add)(X),
    "a builtin": lambda T: T.vmap(torch.dot)(X, X + 1),
    "an empty batch": lambda T: T.vmap(torch.sin)(torch.randn(0, 3)),
    "an empty batch, reduced": lambda T: T.vmap(torch.sum)(torch.randn(0, 3)),
    "an empty batch of matrices": lambda T: T.vmap(torch.mm)(
        torch.randn(0, 3, 2), torch.randn(0, 2, 3)
    ),
    "a batch of one": lambda T: T.vmap(torch.sin)(torch.randn(1, 3)),
    "integers": lambda T: T.vmap(lambda x: x // 2 + 1)(torch.arange(6).view(3, 2)),
    "bools": lambda T: T.vmap(lambda x: ~x & x.any())(torch.tensor([[True, False]] * 3)),
    "complex numbers": lambda T: T.vmap(lambda x: x.abs() * x.conj())(torch.complex(X, X)),
    "doubles and floats": lambda T: T.vmap(lambda x, y: x + y)(X, X.double()),
    "a scalar promotes by its kind": lambda T: T.vmap(lambda x, y: x * y)(
        torch.ones(3, 2, dtype=torch.float32), torch.ones(3, dtype=torch.float64)
    ),
    "a decorated function": lambda T: T.vmap(functools.lru_cache(torch.neg))(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_as_torch_func(name: str) -> None:
    as_torch_func(CALLS[name])


def test_more_than_torch_func() -> None:
    same(vmap(lambda x: W, out_dims=1)(X), W[:, None].expand(4, 3))
    same(vmap(torch.sin, chunk_size=2)(torch.zeros(0, 3)), torch.zeros(0, 3))


def test_name_and_doc_are_kept() -> None:
    def squared(x: Tensor) -> Tensor:
        """Its doc."""
        return x * x

    assert vmap(squared).__name__ == "squared"
    assert vmap(squared).__doc__ == "Its doc."


def test_chunks_with_several_arguments() -> None:
    x, y = torch.randn(7, 2), torch.randn(2, 7)
    for chunk in (1, 3, 7, 10):
        got = vmap(lambda a, b, c: a * b + c, (0, 1, None), chunk_size=chunk)(x, y, torch.ones(2))
        same(got, x * y.T + 1)


# Operators without a rule.


def test_an_operator_without_a_rule_warns_once() -> None:
    @torch.library.custom_op("tsfunc_tests::halved_once", mutates_args=())
    def halved(x: Tensor) -> Tensor:
        return x / 2

    with pytest.warns(
        SlowFallbackWarning, match="batching rule for tsfunc_tests::halved_once"
    ) as seen:
        for _ in range(3):
            same(vmap(halved)(X), X / 2)
            same(vmap(vmap(halved))(torch.stack([X, X])), torch.stack([X, X]) / 2)
    assert len(seen) == 1


def test_a_custom_operator_with_several_results() -> None:
    @torch.library.custom_op("tsfunc_tests::both", mutates_args=())
    def both(x: Tensor, factor: float) -> list[Tensor]:
        return [x * factor, x.sum()]

    with pytest.warns(SlowFallbackWarning):
        same(vmap(lambda x: both(x, 2.0))(X), [X * 2, X.sum(1)])
