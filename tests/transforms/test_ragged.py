"""Examples of different sizes: nested tensors as inputs of ``vmap``, and as its results."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import tsfunc
from tests.transforms.support import same
from tsfunc import vmap
from tsfunc.errors import DataDependentError

split = functools.partial(vmap, data_dependent="split")

# The layout logs once that it is traced.
Tensors = list[Tensor]


def nested(examples: Tensors) -> Any:
    return torch.nested.as_nested_tensor(examples, layout=torch.jagged)


def examples_of(lengths: list[int], *rest: int) -> Tensors:
    return [torch.randn(n, *rest) for n in lengths]


def same_examples(got: Any, want: Tensors, **tolerance: Any) -> None:
    """Compare the examples in a nested tensor, a list, or a stacked tensor."""
    each = got if isinstance(got, list) else got.unbind(0)
    assert len(each) == len(want)
    for g, w in zip(each, want, strict=True):
        torch.testing.assert_close(g, w, **tolerance)


NET = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval().requires_grad_(False)
W = torch.arange(20.0).view(4, 5) / 10

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean of a dim": lambda x: x.mean(0),
    "standard deviation": lambda x: x.std(0, correction=0),
    "median": lambda x: x.median(0).values,
    "softmax": lambda x: x.softmax(0),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "elementwise": lambda x: x.sin() * 2 + 1,
    "matmul": lambda x: x @ W,
    "gram matrix": lambda x: x.T @ x,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "cumulative": lambda x: x.cumsum(0).flip(0),
    "module": lambda x: NET(x),
    "size": lambda x: x * x.shape[0],
    "shifted": lambda x: x.roll(1, 0) - x,
    "transposed": lambda x: x.T,
    "longer": lambda x: torch.cat([x, x.new_zeros(1, 4)]),
}


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_the_loop(name: str, chunk_size: int | None) -> None:
    func = FUNCTIONS[name]
    examples = examples_of([3, 1, 5, 3, 2, 1], 4)
    got = vmap(func, chunk_size=chunk_size)(nested(examples))
    want = [func(x) for x in examples]
    assert bool(got.is_nested) is (len({x.shape for x in want}) > 1)
    same_examples(got, want)


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9), width=st.integers(1, 3))
def test_reductions_are_right_for_each_length(lengths: list[int], width: int) -> None:
    examples = examples_of(lengths, width)

    def func(x: Tensor) -> Tensor:
        return x.sum(0) / max(1, x.shape[0])

    got = vmap(func)(nested(examples))
    same(got, torch.stack([func(x) for x in examples]))
    outer = vmap(lambda x: x[:, None] * 2)(nested(examples))
    same_examples(outer, [x[:, None] * 2 for x in examples])


def test_beside_tensors_and_unmapped_inputs() -> None:
    examples, scales, shift = examples_of([2, 4, 2], 3), torch.randn(3), torch.randn(5, 3)

    def func(batch: Any, scale: Tensor, *, shift: Tensor) -> Tensor:
        return (batch["x"] * scale + batch["y"]).sum(0) + shift.sum(0)

    columns = torch.randn(3, 3)
    got = vmap(func, in_dims=({"x": 0, "y": 1}, 0))(
        {"x": nested(examples), "y": columns}, scales, shift=shift
    )
    want = [
        func({"x": x, "y": y}, s, shift=shift)
        for x, y, s in zip(examples, columns.T, scales, strict=True)
    ]
    same_examples(got, want)


def test_two_nested_inputs() -> None:
    """Examples run together if the sizes of both agree."""
    queries, keys = examples_of([2, 2, 3, 2], 4), examples_of([5, 1, 1, 5], 4)
    got = vmap(lambda q, k: (q @ k.T).softmax(1) @ k)(nested(queries), nested(keys))
    want = [(q @ k.T).softmax(1) @ k for q, k in zip(queries, keys, strict=True)]
    same_examples(got, want)


def test_results_combine_with_inputs_of_the_same_lengths() -> None:
    x = nested(examples_of([2, 4, 1], 3))
    same_examples(x + vmap(torch.sin)(x), [e + e.sin() for e in x.unbind()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_results_have_the_layout_of_the_inputs() -> None:
    """In the strided layout, examples may differ in any of their dims."""
    xs = [torch.randn(n, 3) for n in (2, 4, 1)]
    ys = [torch.randn(3, n) for n in (5, 2, 3)]
    x, y = torch.nested.nested_tensor(xs), torch.nested.nested_tensor(ys)

    def examples(got: Any) -> Any:
        assert got.is_nested and got.layout is torch.strided
        return got.unbind()

    same(examples(vmap(lambda x: x.sin() * 2)(x)), tuple(x.sin() * 2 for x in xs))
    same(examples(vmap(torch.matmul)(x, y)), tuple(x @ y for x, y in zip(xs, ys, strict=True)))
    same(examples(vmap(torch.matmul, (0, None))(x, ys[0])), tuple(x @ ys[0] for x in xs))
    leaves = [x.clone().requires_grad_() for x in xs]
    parent = torch.nested.as_nested_tensor(leaves, layout=torch.strided)
    vmap(torch.square)(parent).to_padded_tensor(0.0).sum().backward()
    same([leaf.grad for leaf in leaves], [2 * x for x in xs])
    mixed = vmap(torch.matmul)(nested(xs), y)
    assert isinstance(mixed, list)


def test_the_strided_layout_and_lengths_with_gaps() -> None:
    examples = [torch.randn(2, 3), torch.randn(4, 1), torch.randn(2, 3)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prot")
        strided = torch.nested.nested_tensor(examples)
    same(vmap(torch.sum)(strided), torch.stack([x.sum() for x in examples]))
    base = torch.randn(3, 5, 2)
    gaps = torch.nested.narrow(
        base, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged
    )
    want = [base[0, :2].sum(0), base[1, 1:4].sum(0), base[2, 2:3].sum(0)]
    same(vmap(lambda x: x.sum(0))(gaps), torch.stack(want))


def test_gradients_through_nested_tensors() -> None:
    examples = [x.requires_grad_() for x in examples_of([3, 1, 3, 2], 4)]
    w = torch.randn(4, requires_grad=True)
    out: Any = vmap(lambda x: (x * w).cumsum(0))(nested(examples))
    out.values().sin().sum().backward()
    got = [x.grad for x in [*examples, w]]
    for x in [*examples, w]:
        x.grad = None
    torch.cat([(x * w).cumsum(0) for x in examples]).sin().sum().backward()
    for g, x in zip(got, [*examples, w], strict=True):
        torch.testing.assert_close(g, x.grad)


def test_transforms_inside() -> None:
    examples = examples_of([3, 1, 3, 2], 4)
    func = lambda x: x.sin().prod(1).sum()  # noqa: E731
    got = vmap(tsfunc.grad(func))(nested(examples))
    same_examples(got, [torch.func.grad(func)(x) for x in examples])
    got = vmap(vmap(torch.sum))(nested(examples))
    same_examples(got, [x.sum(1) for x in examples])
    loss = lambda x: vmap(func)(x).sum()  # noqa: E731
    wrt = nested(examples).requires_grad_()
    loss(wrt).backward()  # type: ignore[no-untyped-call]
    same_examples(wrt.grad, [torch.func.grad(func)(x) for x in examples])


def test_writes_into_nested_arguments_reach_the_caller() -> None:
    examples = examples_of([3, 1, 2], 2)
    x = nested(examples)

    def func(e: Tensor) -> Tensor:
        if e.sum() > 0:
            e += 1
        return e.sum()

    want = [e.clone() for e in examples]
    sums = [func(e) for e in want]
    same(split(func)(x), torch.stack(sums))
    same_examples(x, want)


def test_sizes_that_follow_from_the_data() -> None:
    x = torch.tensor([[1.0, -1.0, 2.0], [-1.0, -1.0, -1.0], [3.0, 2.0, 1.0], [1.0, 1.0, -1.0]])
    positive = lambda row: row[row > 0]  # noqa: E731
    want = [positive(row) for row in x]  # type: ignore[no-untyped-call]
    got = split(positive)(x)
    assert got.is_nested and got.layout is torch.jagged
    same_examples(got, want)
    listed = split(positive, ragged="list")(x)
    assert isinstance(listed, list)
    same_examples(listed, want)
    with pytest.raises(DataDependentError, match=re.escape("example: (0,), (2,), (3,). ragged=")):
        split(positive, ragged="error")(x)
    wide = split(lambda row: row[row > 0].expand(2, -1).T.expand(3, -1, -1))(x)
    same_examples(wide, [e.expand(2, -1).T.expand(3, -1, -1) for e in want])
    same_examples(split(positive, chunk_size=3)(x), want)


def test_gradients_of_sizes_that_follow_from_the_data() -> None:
    x = torch.randn(5, 6)
    leaf = x.clone().requires_grad_()
    split(lambda row: row[row > 0].exp())(leaf).values().sum().backward()
    same(leaf.grad, torch.where(x > 0, x.exp(), 0.0))
    got = split(tsfunc.grad(lambda row: row[row > 0].square().sum()))(x)
    same(got, torch.where(x > 0, 2 * x, 0.0))


def test_results_that_do_not_fit_a_nested_tensor_are_a_list() -> None:
    x = torch.tensor([2, 1, 3])
    square = lambda n: torch.ones(int(n), int(n))  # noqa: E731
    assert [e.shape[0] for e in split(square)(x)] == [2, 1, 3]
    ranks = split(lambda n: torch.ones([2] * int(n)))(x)
    assert [e.dim() for e in ranks] == [2, 1, 3]
    pushed = tsfunc.jvp(split(lambda row: row[row > 0]), (torch.randn(4, 6),), (torch.ones(4, 6),))
    assert isinstance(pushed[0], list) and isinstance(pushed[1], list)
    rows = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 1]]])
    inner = vmap(split(torch.nonzero), data_dependent="split")(rows)
    assert isinstance(inner, list) and inner[1].shape == (2, 2, 1)


def test_refusals() -> None:
    x = nested(examples_of([3, 1], 4))
    with pytest.raises(RuntimeError, match="Nested tensors can only be vmapped over dim=0"):
        vmap(torch.sum, in_dims=1)(x)
    with pytest.raises(ValueError, match="got nested tensors of 2 and of 3 examples"):
        vmap(torch.add)(x, nested(examples_of([3, 1, 1], 4)))
    with pytest.raises(ValueError, match="got 3 beside a nested tensor of 2 examples"):
        vmap(torch.add)(x, torch.ones(3))
    with pytest.raises(RuntimeError, match="give out_dims=0 for this output, or ragged='list'"):
        vmap(torch.sin, out_dims=1)(x)
    assert vmap(torch.sin, out_dims=(-3))(x).is_nested
    with pytest.raises(DataDependentError, match="you're attempting to use a Tensor in some"):
        vmap(lambda e: e if e.sum() > 0 else -e)(nested(examples_of([3, 3], 4)))


def test_torch_logs_nothing_about_ragged_results() -> None:
    code = (
        "import torch, tsfunc\n"
        "tsfunc.vmap(lambda x: x[x > 0], data_dependent='split')(torch.eye(3) - torch.ones(3))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
