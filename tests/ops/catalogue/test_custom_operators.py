"""Custom operators under vmap: with torch's vmap rules, with our rules, with a category only."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc.errors import DispatchError, SlowFallbackWarning, UnknownOperatorError
from tsfunc.ops import Category

_numbers = itertools.count()
_keep: list[Any] = []  # torch unregisters an operator that has no reference


def new_name() -> str:
    """Return an unused name: torch can't undefine an operator."""
    return f"tsfunc_tests::op{next(_numbers)}"


def custom_op(function: Callable[..., Any], **options: Any) -> Any:
    """Return the function as a custom operator."""
    made = torch.library.custom_op(new_name(), function, **{"mutates_args": (), **options})
    _keep.append(made)
    return made


@pytest.fixture(autouse=True)
def _loops_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFallbackWarning)
        yield


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """Return a broadcast product, computed by NumPy."""
    return torch.from_numpy(x.detach().numpy() * y.detach().numpy())


def normalized(x: Tensor) -> Tensor:
    """Return each row divided by its largest element, computed by NumPy."""
    return torch.from_numpy(x.numpy() / x.numpy().max(-1, keepdims=True))


def loop(f: Callable[..., Any], dims: tuple[int | None, ...], *xs: Tensor) -> Tensor:
    """Return the stacked results of a loop over the examples."""
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    return torch.stack(
        [f(*[x if d is None else x.select(d, i) for x, d in zip(xs, dims, strict=True)])
         for i in range(size)]
    )  # fmt: skip


def differentiable() -> Any:
    """Return a product with torch's derivative and vmap rule, and a list that the rule fills."""
    op = custom_op(multiplied)
    seen: list[Any] = []

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return op(grad, y), op(grad, x)

    def rule(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        seen.append((info.batch_size, info.randomness, in_dims))
        at_end = [
            t.unsqueeze(-1) if d is None else t.movedim(d, -1)
            for t, d in zip((x, y), in_dims, strict=True)
        ]
        out = op(*at_end)
        return out, out.dim() - 1

    op.register_autograd(backward, setup_context=setup)
    torch.library.register_vmap(op, rule)
    return op, seen


@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (None, 1), (0, None)])
def test_a_rule_for_torch_is_used_as_it_is(dims: Any) -> None:
    op, seen = differentiable()
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    out = tsfunc.vmap(op, in_dims=dims, randomness="same")(x, y)
    torch.testing.assert_close(out, loop(multiplied, dims, x, y))
    assert seen == [(3, "same", dims)]


def test_a_rule_for_torch_under_nested_vmaps() -> None:
    op, seen = differentiable()
    x, y = torch.randn(4, 2), torch.randn(2, 5, 4)
    out = tsfunc.vmap(tsfunc.vmap(op, in_dims=(None, 0)), in_dims=(1, 0))(x, y)
    torch.testing.assert_close(out, x.T[:, None] * y)
    assert [size for size, _, _ in seen] == [5, 2]  # the rule serves each level


def test_a_rule_for_torch_beside_derivatives() -> None:
    op, _ = differentiable()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    per_example = tsfunc.vmap(tsfunc.grad(lambda a, b: op(a, op(a, b)).sum()))(x, y)
    torch.testing.assert_close(per_example, 2 * x * y)
    whole = tsfunc.grad(lambda a: tsfunc.vmap(op, (0, None))(a, y[0]).sum())(x)
    torch.testing.assert_close(whole, y[0].expand(3, 4))
    slope = tsfunc.grad(lambda a: op(a, op(a, a)).sum())
    second = tsfunc.vmap(tsfunc.grad(lambda a: slope(a).sum()))
    torch.testing.assert_close(second(x), 6 * x)
    weight = torch.randn(4, requires_grad=True)
    tsfunc.vmap(op, (0, None))(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0))


def test_a_rule_whose_result_is_not_batched() -> None:
    op = custom_op(lambda x: x.sum() * 0 + 1, schema="(Tensor x) -> Tensor")
    op.register_vmap(lambda info, in_dims, x: (torch.ones(()), None))
    out = tsfunc.vmap(lambda x: (op(x), x), out_dims=(None, 0))(torch.randn(3, 2))
    assert out[0].shape == ()


def test_a_rule_for_an_operator_that_writes() -> None:
    def zap(x: Tensor, factor: float) -> None:
        x.mul_(factor)

    op = custom_op(zap, mutates_args=("x",))
    op.register_vmap(lambda info, in_dims, x, factor: (op(x, factor), None))
    x = torch.randn(3, 2)
    want = x * 2

    def f(row: Tensor) -> Tensor:
        op(row, 2.0)
        return row + 1

    torch.testing.assert_close(tsfunc.vmap(f)(x), want + 1)
    torch.testing.assert_close(x, want)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(3), "expected to have two returns, (output, out_dims), got a Tensor"),
        ((torch.ones(3), 0, 0), "(output, out_dims), got 3 of them"),
        (((torch.ones(3), torch.ones(3)), (0,)), "incompatible (output, out_dims)"),
    ],
)
def test_a_rule_that_returns_something_else(returned: Any, message: str) -> None:
    op = custom_op(multiplied)
    op.register_vmap(lambda info, in_dims, x, y: returned)
    with pytest.raises(RuntimeError, match=f"register_vmap was given for.*{re.escape(message)}"):
        tsfunc.vmap(op)(torch.ones(3), torch.ones(3))


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Yield a library whose operators are defined without ``custom_op``."""
    with torch.library._scoped_library("tsfunc_library", "DEF") as found:
        yield found


def test_a_rule_for_an_operator_that_torch_keeps_as_a_kernel(library: Any) -> None:
    library.define("mix(Tensor x, Tensor[] ys, float n=2.) -> (Tensor, Tensor)")
    library.impl("mix", lambda x, ys, n=2.0: (x * n + sum(ys), x.clone()), "CPU")
    mix = torch.ops.tsfunc_library.mix
    seen = []

    def rule(info: Any, in_dims: Any, x: Tensor, ys: Any, n: float = 2.0) -> Any:
        seen.append(in_dims)
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        moved = []
        for y, d in zip(ys, in_dims[1], strict=True):
            while d is not None and y.dim() < x.dim():
                y, d = y.unsqueeze(0), d + 1
            moved.append(y if d is None else y.movedim(d, 0))
        return mix(x, moved, n), (0, 0)

    torch.library.register_vmap("tsfunc_library::mix", rule, lib=library)
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    first, second = tsfunc.vmap(lambda x, y: mix(x, [y, torch.ones(4)], 3.0), (0, 1))(x, y)
    torch.testing.assert_close(first, 3 * x + y.T + 1)
    torch.testing.assert_close(second, x)
    nested = tsfunc.vmap(tsfunc.vmap(lambda x, y: mix(x, [y])[0], (0, None)), (None, 1))(x, y)
    torch.testing.assert_close(nested, 2 * x[None] + y.T[:, None])
    assert seen[0][0] == 0
    assert seen[0][1][1] is None
    assert tsfunc.ops.lookup("tsfunc_library::mix").rule is None  # it is behind torch's kernel


def pointwise_operator(library: Any, *, fake: bool, tag: bool) -> Any:
    name = new_name().partition("::")[2]
    tags = (torch.Tag.pointwise,) if tag else ()
    library.define(f"{name}(Tensor x, Tensor y) -> Tensor", tags=tags)
    library.impl(name, multiplied, "CPU")
    if fake:
        torch.library.register_fake(f"tsfunc_library::{name}", torch.mul, lib=library)
    return getattr(torch.ops.tsfunc_library, name)


def test_the_pointwise_tag_is_a_rule(library: Any) -> None:
    op = pointwise_operator(library, fake=True, tag=True)
    x, y = torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(tsfunc.vmap(op, (0, None))(x, y), x * y)
    torch.testing.assert_close(tsfunc.vmap(tsfunc.vmap(op, (0, None)), (None, 0))(x[0], y),
                               x[0] * y[:, None])  # fmt: skip
    report = tsfunc.explain(tsfunc.vmap(op), y, y)
    assert [(use.how, use.rule, use.category) for use in report.uses] == [
        ("category", "pointwise", "TensorIterator")
    ]


@pytest.mark.parametrize(("fake", "tag"), [(True, False), (False, True)])
def test_unverified_operators_are_looped_over(library: Any, fake: bool, tag: bool) -> None:
    # Example shapes decide the category: by these shapes alone, a softmax over the last dim is
    # pointwise.
    op = pointwise_operator(library, fake=fake, tag=tag)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.warns(SlowFallbackWarning, match="op"):
        torch.testing.assert_close(tsfunc.vmap(op)(x, y), x * y)


def test_a_category_gives_its_rule_where_the_fake_kernel_agrees() -> None:
    op = custom_op(multiplied)
    op.register_fake(torch.mul)
    tsfunc.ops.register(op, category="TensorIterator")
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    torch.testing.assert_close(tsfunc.vmap(op, (0, 1))(x, y), x * y.T)
    entry = tsfunc.ops.lookup(op)
    assert entry.category is Category.TENSOR_ITERATOR
    assert entry.source.startswith(f"registered at {__file__}")
    assert entry.file.endswith("tensor_iterator.py")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_batched_means_that_leading_dims_are_a_batch(dim: int) -> None:
    op = custom_op(normalized)
    op.register_fake(torch.empty_like)
    tsfunc.ops.register(op, category=Category.BATCHED)
    x = torch.rand(3, 3, 3) + 1
    torch.testing.assert_close(tsfunc.vmap(op, dim)(x), loop(normalized, (dim,), x))


def test_a_category_that_the_fake_kernel_refutes_is_not_used() -> None:
    def summed(x: Tensor) -> Tensor:
        return x.sum()

    op = custom_op(summed)
    op.register_fake(summed)
    tsfunc.ops.register(op, category="Identity")
    x = torch.randn(3, 4)
    with pytest.warns(SlowFallbackWarning, match="op"):
        torch.testing.assert_close(tsfunc.vmap(op)(x), x.sum(1))


@pytest.mark.parametrize("category", ["Identity", "Batched"])
def test_where_an_argument_names_dims_a_category_gives_no_rule(category: str) -> None:
    def summed(x: Tensor, dim: int) -> Tensor:
        return x.cumsum(dim)

    op = custom_op(summed)
    op.register_fake(lambda x, dim: torch.empty_like(x))
    tsfunc.ops.register(op, category=category)
    x = torch.randn(3, 4, 2)
    with pytest.warns(SlowFallbackWarning, match="op"):
        torch.testing.assert_close(tsfunc.vmap(lambda x: op(x, 0))(x), x.cumsum(1))


def test_a_rule_of_ones_own() -> None:
    op = custom_op(multiplied)
    seen = []

    def rule(op: Any, level: Any, dims: Any, args: Any, kwargs: Any) -> Any:
        seen.append((dims, level.batch_size))
        return op(args[0].movedim(dims[0], 0), args[1]), 0

    x, y = torch.randn(4, 3), torch.randn(4)
    with pytest.warns(SlowFallbackWarning):
        tsfunc.vmap(op, (1, None))(x, y)  # before: the operator is known, and has no rule
    tsfunc.ops.register(op, category="TensorIterator", rule=rule)
    torch.testing.assert_close(tsfunc.vmap(op, (1, None))(x, y), x.T * y)
    assert seen == [([1, None], 3)]
    assert tsfunc.ops.lookup(op).rule is rule
    assert tsfunc.ops.lookup(op).line == rule.__code__.co_firstlineno


def test_a_rule_of_ones_own_counts_before_that_for_torch() -> None:
    op, seen = differentiable()
    tsfunc.ops.register(
        op, category="TensorIterator", rule=lambda op, level, bdims, args, kwargs: (op(*args), 0)
    )
    x = torch.randn(3, 4)
    torch.testing.assert_close(tsfunc.vmap(op)(x, x), x * x)
    assert seen == []


def test_registrations_that_are_refused() -> None:
    op = custom_op(multiplied)
    with pytest.raises(UnknownOperatorError, match="Define it first"):
        tsfunc.ops.register("tsfunc_tests::nothing", category="Batched")
    with pytest.raises(DispatchError, match=r"torch's own operators.*DispatchKey\.Batch"):
        tsfunc.ops.register("aten::sin", category="Batched")
    with pytest.raises(ValueError, match="'Batch' is not a valid Category"):
        tsfunc.ops.register(op, category="Batch")
    tsfunc.ops.register(op, category="Batched")
    with pytest.raises(DispatchError, match="has a row already"):
        tsfunc.ops.register(op, category="Fixed")


def test_the_category_of_a_custom_operator_from_its_fake_kernel() -> None:
    added = custom_op(lambda x, y: x + y, schema="(Tensor x, Tensor y) -> Tensor")
    added.register_fake(lambda x, y: x + y)
    matrices = custom_op(lambda x, y: x @ y, schema="(Tensor x, Tensor y) -> Tensor")
    matrices.register_fake(torch.mm)
    along = custom_op(lambda x, dim: x.cumsum(dim), schema="(Tensor x, int dim) -> Tensor")
    along.register_fake(lambda x, dim: torch.empty_like(x.cumsum(dim)))
    listed = custom_op(lambda xs: xs[0].clone(), schema="(Tensor[] xs) -> Tensor")
    made = custom_op(lambda n: torch.ones(n), schema="(int n) -> Tensor")
    counted = custom_op(lambda x: x.dim(), schema="(Tensor x) -> int")
    unknown = custom_op(lambda x: x.clone(), schema="(Tensor x) -> Tensor")
    for op, category, why in (
        (added, Category.TENSOR_ITERATOR, "tried: every rank, and the arguments broadcast"),
        (matrices, Category.FIXED, "tried: x 2, y 2"),
        (along, Category.N_DIMENSIONAL, "tried: x 0-6; dims by dim"),
        (listed, Category.VARIADIC, "schema: its tensors come in lists"),
        (made, Category.FACTORY, "schema: it takes no tensor"),
        (counted, Category.TRIVIAL, "schema: it returns no tensor"),
        (unknown, Category.OTHER, "unknown: schema, tags and trying do not tell"),
    ):
        entry = tsfunc.ops.lookup(op)
        assert (entry.category, entry.source) == (category, why)
    unknown.register_fake(lambda x: x[:1].clone())  # a rule that is registered later is used
    assert tsfunc.ops.lookup(unknown).category is Category.BATCHED
