"""Sizes of named dims as choices, counts, carries and results of control flow, in programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.transforms.support import leaves
from tsfunc import (
    MetaTensorType,
    cond,
    fori_loop,
    scan,
    specialize,
    switch,
    vmap,
    while_loop,
)

SIZES = (2, 3, 5, 9)


def assert_same(got: Any, want: Any) -> None:
    """Compare values; a program has tensors in place of some numbers."""
    for g, w in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(torch.as_tensor(g), torch.as_tensor(w))


def for_any_size(f: Callable[..., Any]) -> Any:
    """Return the function as a program for tensors of any number of entries."""
    return specialize(f, {"x": MetaTensorType(["n"])})


def check(f: Callable[..., Any]) -> Any:
    """Check that one program for all sizes agrees with the function."""
    program = for_any_size(f)
    for n in SIZES:
        x = torch.randn(n, requires_grad=True)
        assert_same(program(x), f(x))
    assert program.cache_info().programs == 1
    return program


def test_a_size_decides_which_branch_is_taken() -> None:
    check(lambda x: cond(x.shape[0] == 3, torch.sin, torch.cos, x))
    check(lambda x: cond(x.shape[0] > 4, torch.sin, torch.cos, x))
    check(lambda x: switch(x.shape[0] - 3, [torch.sin, torch.cos, torch.tanh], x))
    check(lambda x: cond(x.shape[0] > 1, torch.sin, torch.cos, x))  # known for every size


def test_a_size_that_depends_on_data_decides() -> None:
    program = specialize(lambda x: cond(x.nonzero().shape[0] == 1, torch.sin, torch.cos, x))
    one, two = torch.tensor([0.0, 3.0]), torch.tensor([2.0, 3.0])
    assert_same(program(one), one.sin())
    assert_same(program(two), two.cos())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: fori_loop(0, x.shape[0], lambda i, total: total + i * x, x),
        lambda x: fori_loop(x.shape[0] - 3, 4, lambda i, total: total + i, torch.tensor(0)),
        lambda x: fori_loop(x.shape[0], 1, lambda i, total: total + i, torch.tensor(7)),
        lambda x: while_loop(lambda c: c[0] < x.shape[0], lambda c: (c[0] + 1, c[1] * 2), (0, x)),
        lambda x: while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * 2), (x.shape[0], x)),
        lambda x: scan(lambda c, _: (c * 2, c), x.sum(), None, length=x.shape[0]),
        lambda x: scan(lambda c, _: (c + 1, c), 0, None, length=2 * x.shape[0], reverse=True),
        lambda x: scan(lambda c, row: (c + 1, row * c), x.shape[0], x),
    ],
    ids=[
        "fori-to",
        "fori-from",
        "fori-none",
        "while-to",
        "while-carried",
        "scan-length",
        "scan-reverse",
        "scan-carried",
    ],
)
def test_a_size_counts_steps(f: Callable[..., Any]) -> None:
    check(f)


def test_a_loop_to_a_size_has_its_gradient() -> None:
    program = for_any_size(lambda x: fori_loop(0, x.shape[0], lambda i, total: total * x + i, x))
    for n in (2, 4):
        x = torch.randn(n, dtype=torch.float64, requires_grad=True)
        expected = x
        for i in range(n):
            expected = expected * x + i
        (slope,) = torch.autograd.grad(program(x).sum(), x)
        torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), x)[0])


def test_branches_take_sizes_and_return_them() -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(
            x.sum() > 0, lambda n, x: (x * n, n), lambda n, x: (x + n, 2 * n), x.shape[0], x
        )

    program = for_any_size(f)
    for n in (2, 6):
        for x in (torch.ones(n), -torch.ones(n)):
            values, size = program(x)
            assert_same(values, f(x)[0])
            assert size == (n if x[0] > 0 else 2 * n)


def test_a_size_beside_a_tensor_is_a_number_of_its_kind() -> None:
    program = for_any_size(
        lambda x: cond(x.sum() > 0, lambda: x.shape[0], lambda: torch.tensor(0.5))
    )
    found = program(torch.ones(3))
    assert found == 3 and found.dtype is torch.float32


def test_a_size_that_a_loop_carries_unchanged_stays_a_size() -> None:
    def step(carry: Any, row: torch.Tensor) -> Any:
        total, n = carry
        return (total + row.expand(n), n), None

    program = for_any_size(lambda x: scan(step, (torch.zeros_like(x), x.shape[0]), x)[0])
    for n in (3, 4):
        x = torch.randn(n)
        total, size = program(x)
        assert_same(total, x.sum().expand(n))
        assert size == n


def test_a_loop_over_numbers_is_one_node() -> None:
    def f(x: torch.Tensor) -> Any:
        return while_loop(lambda c: c[0] < 100, lambda c: (c[0] + 1, c[1].sin()), (0, x))

    program = specialize(f)
    x = torch.randn(3)
    assert_same(program(x), f(x))
    # One loop, not a hundred steps. Its carries are copied before it, and selected after it, since
    # a loop without steps has another derivative.
    nodes = program.graph_module.graph.nodes
    assert [node.target for node in nodes].count(torch.ops.higher_order.while_loop) == 1
    assert len(nodes) < 20
    batched = specialize(vmap(f))
    assert_same(batched(x.view(3, 1))[1], vmap(f)(x.view(3, 1))[1])


def test_a_body_that_needs_numbers_as_python_has_them_is_called_for_each() -> None:
    def f(x: torch.Tensor) -> Any:
        return while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, sum((x * k for k in range(i)), x)), (0, x)
        )

    x = torch.randn(3)
    assert_same(specialize(f)(x)[1], f(x)[1])


def test_statements_without_gradient_may_stand_around_inputs() -> None:
    weight, bias = torch.randn(3, 3), torch.randn(3)

    def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
        with torch.no_grad():
            row = row @ weight
            shift = carry + bias
        return carry + row, carry * shift

    init, rows = torch.randn(3, requires_grad=True), torch.randn(4, 3)
    expected = scan(step, init, rows)
    found = specialize(lambda init, rows: scan(step, init, rows))(init, rows)
    assert_same(found, expected)
    (slope,) = torch.autograd.grad(found[1].sum(), init)
    torch.testing.assert_close(slope, torch.autograd.grad(expected[1].sum(), init)[0])
